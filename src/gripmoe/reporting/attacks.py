"""Tables and figures of attacks: which methods erase, and which only hide."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.reporting import names
from gripmoe.reporting.comparison import absent, added_to, comparison, marks_of
from gripmoe.reporting.figures import (
    Marker,
    draw_line,
    house_style,
    label_ends,
    label_markers,
    legend_below,
    nothing,
    panels_of,
)
from gripmoe.reporting.paired import RESAMPLES, paired_interval
from gripmoe.reporting.runs import KEYS, beside, load_attacks, load_runs, values_of
from gripmoe.reporting.specifications import specification
from gripmoe.reporting.tables import Cell, Table, with_half_width
from gripmoe.reporting.uncertainty import interval, units

FULL_SHADE = 0.7  # about the most that an attack can return
ON_ALL_QUESTIONS = {"forced_forget_accuracy", "prompt_five_shot", "prompt_verse"}  # other attacks ask a sample


def table_of(path: Path, name: str) -> tuple[Table, list[Path]]:
    """The table `name` of comparisons.yaml from the table of runs in `path`, and the files that it was made of."""
    spec = specification(name)
    runs = load_runs(path, spec.get("kind", "letters"))
    if spec.get("differences"):
        return attack_matrix(runs, load_attacks(path), name), [path, beside(path, "attacks")]
    return comparison(runs, name), [path]


def attack_matrix(runs: pd.DataFrame, attacks: pd.DataFrame | None = None, name: str = "attack_matrix") -> Table:
    """The accuracy of every method, and what each attack adds to it (darker is more): the table `name` of
    comparisons.yaml, in which an attack is right of the measure that it adds to. With the table of `attacks`,
    differences are paired by item, and intervals are bootstrapped over runs and items (for letter questions, over
    facts). Without it, only letter questions are shown, with intervals over runs."""
    by_run = {} if attacks is None else dict(list(attacks.set_index("fact").groupby(KEYS)))
    spec = specification(name)
    measures = added_to(spec)

    def recovered(of_row: pd.DataFrame, metric: str, news: bool) -> Cell:
        own = measures[metric]
        mean, half = _paired(by_run, of_row, metric, own) if by_run else _over_runs(of_row, metric, own)
        if mean is None:
            return absent(of_row, metric)
        full, decimals = (100 * FULL_SHADE, 0) if news else (FULL_SHADE, 2)
        shade = 0.0 if metric == own else min(1.0, max(0.0, mean) / full)
        return Cell(with_half_width(mean, half, decimals), mean, half, shade=shade)

    table = comparison(runs, name, recovered)
    table.notes.append("The darker, the more comes back.")
    if by_run:
        drawn = "items" if spec.get("kind") == "news" else "the facts that questions ask about"
        table.notes[0] = (
            f"Means; ± half of a 95 % interval: Student's over base models from three on, below a bootstrap of"
            f" {RESAMPLES} resamples of runs and of {drawn}, paired by item. {spec['title']}."
        )
    return table


Estimate = tuple[float | None, float | None]  # mean and half of its interval


def _paired(by_run: dict, of_row: pd.DataFrame, metric: str, own: str) -> Estimate:
    differences, models = [], []
    for key in of_row.drop_duplicates("run")[KEYS].itertuples(index=False, name=None):
        asked = by_run.get(key, {})
        if metric not in asked:
            continue
        difference = (asked[own] if metric == own else asked[metric] - asked[own]).dropna()
        if len(difference):
            differences.append(difference)
            models.append(key[0])
    if not differences:
        return None, None
    mean, low, high = paired_interval(differences, models)
    return mean, (high - low) / 2


def _over_runs(of_row: pd.DataFrame, metric: str, own: str) -> Estimate:
    values = values_of(of_row, metric)
    if metric != own:
        plain = values_of(of_row, "prompt_plain")  # on the sample
        values = values - (values_of(of_row, own) if metric in ON_ALL_QUESTIONS or plain.empty else plain)
    mean, half = interval(units(values))
    return (None, None) if pd.isna(mean) else (mean, half)


MARKERS = {  # later ones are drawn on top
    "forced_forget_accuracy": Marker("o", 6, False, "original sets forced"),
    "forget_accuracy": Marker("o", 2.8, True, "as it is"),
    "random_forced_forget_accuracy": Marker("|", 6, True, "random sets forced"),
    "restored_experts_worst_layer": Marker("x", 4, True, "one layer's experts put back"),
}


def forcing_vulnerability(runs: pd.DataFrame) -> plt.Figure:
    """Forget accuracy of every method: as it is, under original and under random expert sets, and with one layer's
    original experts put back (the paper's Figure 1b). Random sets are the control of original sets, and the retrained
    model shows what each attack returns of a model that never knew."""
    found = runs[runs.metric.isin(MARKERS)]
    methods = names.ordered(set(found.method) - {"original"})
    without_objective = set(found.method[found.objective == NO_OBJECTIVE])
    marks = ""
    if not names.objectives_of(found):
        return nothing("no unlearned run was attacked")
    with house_style():
        figure, panels = panels_of(found, max(2.0, 0.9 + 0.17 * len(methods)))
        for axes, objective, group in panels:
            of_models = group.groupby(["objective", "method", "metric", "model"]).value.mean()
            means = of_models.groupby(level=["objective", "method", "metric"]).mean().unstack("metric")
            of_kind = runs[runs.model.isin(group.model) & runs.benchmark.isin(group.benchmark)]
            for y, method in enumerate(reversed(methods)):
                of = NO_OBJECTIVE if method in without_objective else objective
                if (of, method) not in means.index:
                    continue
                row, colour = means.loc[(of, method)], names.colour(method)
                axes.plot([row.min(), row.max()], [y, y], color=colour, linewidth=0.8)
                for metric, marker in MARKERS.items():
                    axes.plot([row.get(metric)], [y], marker.shape, clip_on=False, **marker.look(colour))
                of_method = of_kind[(of_kind.objective == of) & (of_kind.method == method)]
                marks += (marked := marks_of(of_method).replace(" ", ""))
                axes.annotate(marked, (1.03, y), fontsize=6, va="center", annotation_clip=False)
            axes.set(xlabel="forget accuracy", xlim=(0, 1.02), ylim=(-0.7, len(methods) - 0.3))
            axes.set_yticks(range(len(methods)), [names.method_label(m) for m in reversed(methods)])
        first = panels[0][0]
        label_markers(first, MARKERS.values())
        note = "; ".join(text.partition(":")[0] for mark, text in names.MARKS.items() if mark in marks)
        legend_below(figure, first, columns=2, note=note)
    return figure


def relearning_curves(runs: pd.DataFrame) -> plt.Figure:
    """Forget accuracy over steps of finetuning: on documents about other forget facts (solid), on the whole forget
    corpus if the facts of documents are not known (dotted), and on retain documents (dashed). Shows the methods of
    `names.drawn`, and the retrained model, which never knew the answers."""
    sources = {
        "relearned": ("-", "on other forget documents"),
        "relearned_from_corpus": (":", "on the forget corpus"),
        "relearned_from_retain": ("--", "on retain documents"),
    }
    runs = runs[runs.value.notna()]
    return _lines_by_objective(runs, r"(relearned(?:_from_\w+)?)_after_(\d+)", "step of finetuning", sources)


def component_restoration(runs: pd.DataFrame) -> plt.Figure:
    """Forget accuracy with the original experts (solid) or router (dotted) of one layer put back, by layer."""
    sources = {"experts": ("-", "experts"), "router": (":", "router")}
    return _lines_by_objective(runs, r"restored_(experts|router)_layer_(\d+)", "MoE layer put back", sources)


def _lines_by_objective(runs: pd.DataFrame, pattern: str, over: str, sources: dict) -> plt.Figure:
    """One panel per objective, a colour and marker per method, a line style and name per source. Lines are means over
    runs, bands span the runs. `pattern` finds source and step in the names of metrics. Every panel shows the retrained
    model in grey."""
    found = runs[runs.metric.str.fullmatch(pattern)].copy()
    found[["source", "step"]] = found.metric.str.extract(pattern)
    found["step"] = found.step.astype(int)
    sources = {source: look for source, look in sources.items() if source in set(found.source)}
    if set(found.objective) <= {NO_OBJECTIVE}:
        return nothing("no run was attacked in this way")
    with house_style():
        figure, panels = panels_of(found)
        shown: set[str] = set()
        for axes, objective, group in panels:
            keys = ["objective", "method", "source", "step"]
            spans = group.groupby(keys).value.agg(mean="mean", least="min", greatest="max")
            drawn = [(objective, method) for method in names.drawn(group.method[group.objective == objective])]
            drawn += [(NO_OBJECTIVE, "retrained")] if "retrained" in set(group.method) else []
            ends = {}
            for key in drawn:
                for source, (style, _) in sources.items():
                    if (*key, source) in spans.index:
                        line = spans.loc[(*key, source)]
                        draw_line(axes, line, key[1], style)
                        ends.setdefault(key[1], (line.index[-1], line["mean"].iloc[-1]))
            axes.set(ylim=(0, 1.02), xlabel=over)
            if len(panels) == 1:
                label_ends(axes, ends)
                axes.set_xlabel(over, x=0.33)
            axes.set_xticks(sorted(found.step.unique()))
            shown |= set(ends)
        first = panels[0][0]
        for method in names.ordered(shown if len(panels) > 1 else ()):
            first.plot([], [], label=names.method_label(method), **names.look_of(method))
        for style, name in sources.values():
            first.plot([], [], style, color="0.3", label=name)
        first.set_ylabel("forget accuracy")
        legend_below(figure, first)
    return figure
