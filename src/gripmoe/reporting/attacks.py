"""Tables and figures of attacks: which method erases, and which only hides."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from gripmoe.config.grid import NO_OBJECTIVE
from gripmoe.reporting import names
from gripmoe.reporting.collect import KEYS, beside
from gripmoe.reporting.comparison import absent, added_to, comparison, marks_of, specification
from gripmoe.reporting.figures import draw_line, house_style, label_ends, legend_below, look_of, nothing, panels_of
from gripmoe.reporting.paired import RESAMPLES, paired_interval
from gripmoe.reporting.tables import Cell, Table, interval, with_half_width

FULL_SHADE = 0.7  # what an attack returns at most of a model that knew nearly everything


def load_attacks(runs: Path) -> pd.DataFrame:
    """The table of attacked items that belongs to the table of `runs`: a row per cell and item, a column per attack."""
    return pd.read_csv(beside(runs, "attacks"))


def attack_matrix(runs: pd.DataFrame, attacks: pd.DataFrame | None = None, name: str = "attack_matrix") -> Table:
    """What every method forgets, and what each attack adds to it, the darker the more: the table `name` of
    comparisons.yaml, where an attack stands right of the measure that it adds to. With the table of `attacks`
    differences are paired by item, and intervals are bootstrapped over runs and items (of letter questions over the
    facts asked about); without it, for letter questions alone, they are those over runs."""
    by_cell = {} if attacks is None else dict(list(attacks.groupby(KEYS)))
    spec = specification(name)
    measures = added_to(spec)

    def recovered(cells: pd.DataFrame, metric: str, news: bool) -> Cell:
        own = measures[metric]
        mean, half = _paired(by_cell, cells, metric, own) if by_cell else _over_runs(cells, metric, own)
        if mean is None:
            return absent(cells, metric)
        full, decimals = (100 * FULL_SHADE, 0) if news else (FULL_SHADE, 2)
        shade = 0.0 if metric == own else min(1.0, max(0.0, mean) / full)
        return Cell(with_half_width(mean, half, decimals), mean, half, shade=shade)

    table = comparison(runs, name, recovered)
    table.notes[-1] = f"The darker, the more comes back. {table.notes[-1]}"
    if by_cell:
        drawn = "items" if spec.get("kind") == "news" else "the facts that questions ask about"
        table.notes[0] = (
            f"Mean over runs; ± half of a 95 % bootstrap interval, {RESAMPLES} resamples of runs and of {drawn}, paired"
            f" by item. {spec['title']}."
        )
    return table


def _paired(by_cell: dict, cells: pd.DataFrame, metric: str, own: str) -> tuple[float | None, float | None]:
    differences = []
    for key in cells[KEYS].drop_duplicates().itertuples(index=False):
        asked = by_cell.get(tuple(key))
        if asked is None or metric not in asked or asked[metric].isna().all():
            continue
        asked = asked[asked[metric].notna()].set_index("fact")
        differences.append(asked[own] if metric == own else asked[metric] - asked[own])
    if not differences:
        return None, None
    mean, low, high = paired_interval(differences)
    return mean, (high - low) / 2


def _over_runs(cells: pd.DataFrame, metric: str, own: str) -> tuple[float | None, float | None]:
    wide = cells.pivot_table(index=KEYS, columns="metric", values="value")
    if metric not in wide:
        return None, None
    # Forcing is asked about every question, the rest about the sample that the plain prompt is asked about too.
    base = own if metric == "forced_forget_accuracy" or "prompt_plain" not in wide else "prompt_plain"
    values = wide[metric] if metric == own else wide[metric] - wide[base]
    mean, half = interval(values)
    return (None, None) if pd.isna(mean) else (mean, half)


def forcing_vulnerability(runs: pd.DataFrame) -> plt.Figure:
    """Forget accuracy as the model is (dot), under the original expert sets (ring) beside random ones (bar), and
    with one layer's original experts put back (cross), for every method (the paper's Figure 1b). What random sets
    return is not the router's doing. The band is the retrained model's range of the four: no method can be asked to stay below.
    """
    marks = {  # marker, size, whether filled; what is drawn later lies above
        "forced_forget_accuracy": ("o", 6, False, "original sets forced"),
        "forget_accuracy": ("o", 2.8, True, "as it is"),
        "random_forced_forget_accuracy": ("|", 6, True, "random sets forced"),
        "restored_experts_worst_layer": ("x", 4, True, "one layer's experts put back"),
    }
    found = runs[runs.metric.isin(marks)]
    methods = names.ordered(set(found.method) - {"original", "retrained"})
    signs = ""
    with house_style():
        figure, panels = panels_of(found, 0.9 + 0.17 * len(methods))
        for axes, objective, group in panels:
            means = group.groupby(["objective", "method", "metric"]).value.mean().unstack("metric")
            cells = runs[runs.model.isin(group.model) & runs.benchmark.isin(group.benchmark)]
            for y, method in enumerate(reversed(methods)):
                if (objective, method) not in means.index:
                    continue
                row, colour = means.loc[(objective, method)], names.colour(method)
                axes.plot([row.min(), row.max()], [y, y], color=colour, linewidth=0.8)
                for metric, (marker, size, filled, _) in marks.items():
                    look = dict(color=colour, markerfacecolor=colour if filled else "white", markersize=size)
                    axes.plot([row.get(metric)], [y], marker, clip_on=False, **look)
                of_method = marks_of(cells[(cells.objective == objective) & (cells.method == method)]).replace(" ", "")
                axes.annotate(of_method, (1.03, y), fontsize=6, va="center", annotation_clip=False)
                signs += of_method
            if (NO_OBJECTIVE, "retrained") in means.index:
                floor = means.loc[(NO_OBJECTIVE, "retrained")]
                axes.axvspan(floor.min(), floor.max(), color="0.9", zorder=0, linewidth=0)
            axes.set(xlabel="forget accuracy", xlim=(0, 1.02), ylim=(-0.7, len(methods) - 0.3))
            axes.set_yticks(range(len(methods)), [names.method_label(m) for m in reversed(methods)])
        first = panels[0][0]
        for marker, size, filled, text in marks.values():
            look = dict(color="0.3", markerfacecolor="0.3" if filled else "white", markersize=size)
            first.plot([], [], marker, label=text, **look)
        first.plot([], [], color="0.85", linewidth=5, label="retrained model")
        note = "; ".join(text.partition(":")[0] for sign, text in names.MARKS.items() if sign in signs)
        legend_below(figure, first, columns=3, note=note)
    return figure


RELEARNED_FROM = {
    "relearned": "on other forget documents",
    "relearned_from_corpus": "on the forget corpus",
    "relearned_from_others": "on retain documents",
}


def relearning_curves(runs: pd.DataFrame) -> plt.Figure:
    """Forget accuracy over steps of finetuning: on documents about other forget facts (solid), or where facts are not
    known on the whole forget corpus (dotted), and on retain documents (dashed); of the methods that have a colour, and
    of the retrained, which never knew the answers."""
    found = runs[runs.metric.str.fullmatch(r"relearned(_from_\w+)?_after_\d+") & runs.value.notna()].copy()
    found["source"] = found.metric.str.partition("_after_")[0]
    found["step"] = found.metric.str.extract(r"(\d+)$").astype(int)
    styles = {"relearned": "-", "relearned_from_corpus": ":", "relearned_from_others": "--"}
    styles = {source: style for source, style in styles.items() if source in set(found.source)}
    return _lines_by_objective(found, "step of finetuning", styles, RELEARNED_FROM.get)


def component_restoration(runs: pd.DataFrame) -> plt.Figure:
    """Forget accuracy with the original experts (solid) or router (dotted) of one layer put back, by layer."""
    found = runs[runs.metric.str.fullmatch(r"restored_(experts|router)_layer_\d+")].copy()
    found["source"] = found.metric.str.split("_").str[1]
    found["step"] = found.metric.str.extract(r"(\d+)$").astype(int)
    return _lines_by_objective(found, "MoE layer put back", {"experts": "-", "router": ":"}, "{}".format)


def _lines_by_objective(found: pd.DataFrame, over: str, styles: dict, name) -> plt.Figure:
    """A panel per objective, a colour and marker per method, a line style per source; means over runs of the `value` by
    method, `source` and `step`, with bands that span them. The retrained model's lines, grey, stand in every panel."""
    if set(found.objective) <= {NO_OBJECTIVE}:
        return nothing("no cell was attacked in this way")
    with house_style():
        figure, panels = panels_of(found)
        shown: set[str] = set()
        for axes, objective, group in panels:
            keys = ["objective", "method", "source", "step"]
            spans = group.groupby(keys).value.agg(mean="mean", least="min", greatest="max")
            present = set(group.method[group.objective == objective]) & set(names.COLOURS)
            drawn = [(objective, method) for method in names.ordered(present)]
            drawn += [(NO_OBJECTIVE, "retrained")] if "retrained" in set(group.method) else []
            ends = {}
            for key in drawn:
                for source, style in styles.items():
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
            first.plot([], [], label=names.method_label(method), **look_of(method))
        for source, style in styles.items():
            first.plot([], [], style, color="0.3", label=name(source))
        first.set_ylabel("forget accuracy")
        legend_below(figure, first)
    return figure
