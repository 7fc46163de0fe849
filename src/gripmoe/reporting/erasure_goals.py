"""Which methods erase, keep the rest and cost little: four goals, and how far each method is shown to be from them."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import matplotlib.pyplot as plt
import pandas as pd

from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.reporting import names
from gripmoe.reporting.comparison import marks_of
from gripmoe.reporting.erasure import ATTACK_METRICS
from gripmoe.reporting.figures import PAPER_WIDTH, house_style, legend_below, nothing
from gripmoe.reporting.runs import KEYS, by_run
from gripmoe.reporting.tables import MISSING, Cell, Table, fixed
from gripmoe.reporting.uncertainty import LEAST, one_sided_p, student


@dataclass(frozen=True)
class Goal:
    heading: str
    note: str
    level: float
    is_upper: bool  # the measure is to stay below the level

    @property
    def sign(self) -> str:
        return "≤" if self.is_upper else "≥"


GOALS = {
    "excess": Goal(
        "excess",
        "forget accuracy beyond the retrained model's, under the attack with the largest mean of it",
        0.05,
        True,
    ),
    "retained": Goal("retained", "retain accuracy, as a share of the original's", 0.95, False),
    "routing": Goal("RS", "routing stability", 0.94, False),
    "compute": Goal(
        "compute", "tokens of unlearning, as a share of all that the retrained model was trained on", 0.2, True
    ),
}
MEASURES = (*GOALS, "robustness")
# metrics that are read beside ATTACK_METRICS
MEASURED = {"retain_accuracy", "retain_accuracy_share", "routing_stability", "tokens"}
COLUMNS = (
    "objective",
    "method",
    "base_models",
    *(f"{name}{part}" for name in MEASURES for part in ("", "_half_width")),
    *(f"{name}_bound" for name in GOALS),
    *("attack", "excess_p", "excess_bound_of_fact_sets"),
)


def goals(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per objective and method, over the base models that have a retrained model. `<measure>` is the mean over
    base models, `<measure>_half_width` of its 95 % interval, and `<goal>_bound` the one-sided 95 % bound of the measure
    that a goal is about, or NaN below LEAST base models. A measure that a base model lacks is NaN.

    An excess is the mean under one attack. `excess` is the highest of them, of the attack `attack`. So an attacker who
    chooses an attack for each model may get more. `excess_bound` is the highest bound of any attack, and `excess_p` the
    highest p of the hypotheses that the excess under an attack is above the goal. Every attack has to reject it, so
    that their number needs no correction. If an attack was not made on every base model, neither is known. In
    `excess_bound_of_fact_sets` each benchmark counts once. `robustness` is 1 for the retrained and 0 for the original
    model under `attack`, and its interval takes their difference as known."""
    wide = by_run(runs).groupby(KEYS[:-1]).mean().reset_index()
    wide = wide.set_index(["model", "benchmark"])
    originals, retrained = (wide[wide.method == name] for name in names.NOT_UNLEARNED)
    attacks = [name for name in ATTACK_METRICS if name in wide and retrained[name].notna().any()]
    unlearned = wide[(wide.method != "original") & wide.index.isin(retrained.index)] if attacks else wide[:0]
    rows = []
    for (objective, method), found in unlearned.groupby(["objective", "method"]):
        never, before = retrained.reindex(found.index), originals.reindex(found.index)
        excess = found[attacks] - never[attacks]
        if excess.isna().all(axis=None):
            continue
        attack = excess.mean().idxmax()
        gap = (before[attack] - never[attack]).mean() if before[attack].notna().all() else nan
        share = found.get("retain_accuracy_share")
        if "retain_accuracy" in found:
            of_both = found.retain_accuracy / before.retain_accuracy
            share = of_both if share is None else share.fillna(of_both)
        values = {
            "excess": excess[attack],
            "robustness": 1 - excess[attack] / gap,
            "retained": share,
            "routing": found.get("routing_stability"),
            "compute": found.tokens / never.tokens if "tokens" in found else None,
        }
        row = {"objective": objective, "method": method, "base_models": len(found), "attack": attack}
        for name in MEASURES:
            row |= _summary(name, values[name])
        row |= {f"{name}_bound": _bound(name, values[name]) for name in GOALS} | _of_every_attack(excess)
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def _summary(name: str, values: pd.Series | None) -> dict[str, float]:
    mean = half_width = nan
    if values is not None and values.notna().all():
        mean = values.mean()
        half_width = student(values) if len(values) >= LEAST else nan
    return {name: mean, f"{name}_half_width": half_width}


def _bound(goal: str, values: pd.Series | None) -> float:
    if values is None or values.isna().any() or len(values) < LEAST:
        return nan
    one_sided = student(values, level=0.9)
    return values.mean() + (one_sided if GOALS[goal].is_upper else -one_sided)


def _of_every_attack(excess: pd.DataFrame) -> dict[str, float]:
    """What is known of the excess under every attack; the columns are attacks, the rows base models."""
    bounds = [_bound("excess", excess[attack]) for attack in excess]
    by_fact_set = excess.groupby(level="benchmark").mean()
    of_fact_sets = [_bound("excess", by_fact_set[attack]) for attack in by_fact_set]
    p_values = [one_sided_p(-excess[attack], -GOALS["excess"].level) for attack in excess]
    is_known = not pd.isna(bounds).any()
    return {
        "excess_bound": max(bounds) if is_known else nan,
        "excess_p": max(p_values) if is_known else nan,
        "excess_bound_of_fact_sets": max(of_fact_sets) if is_known and not pd.isna(of_fact_sets).any() else nan,
    }


def meets(row: pd.Series | dict, name: str) -> bool:
    """Whether the bound of a row of `goals` shows that the method meets a goal."""
    goal, bound = GOALS[name], row[f"{name}_bound"]
    return bool(bound <= goal.level if goal.is_upper else bound >= goal.level)


def goals_table(runs: pd.DataFrame) -> Table:
    """A row per method under each objective, with its mean and bound for each goal; bold if the bound meets it."""
    summary = goals(runs)
    summary = summary[summary.method != "retrained"]
    table = Table([*(goal.heading for goal in GOALS.values()), "attack"], data=summary)
    for objective in [NO_OBJECTIVE, *names.objectives_of(summary)]:
        measured = summary[summary.objective == objective].set_index("method")
        rows = []
        for method in names.ordered(measured.index):
            row, of_row = measured.loc[method], runs[(runs.objective == objective) & (runs.method == method)]
            cells = [_cell(row, name) for name in GOALS]
            label = names.method_label(method) + marks_of(of_row)
            rows.append((label, [*cells, Cell(names.metric(row.attack).heading)], []))
        table.blocks += [(names.objective_label(objective), rows)] * bool(rows)
    numbers = " or ".join(map(str, sorted(set(summary.base_models))))
    levels = [f"{goal.heading} {goal.sign} {goal.level}" for goal in GOALS.values()]
    table.notes = [
        f"Means over {numbers} base models. Attack: the one of the excess. In brackets: the one-sided 95 % bound; of "
        f"the excess, the highest of any attack. Bold: the bound meets the goal, {', '.join(levels)}. Bounds are not "
        "corrected for the number of methods."
    ]
    table.legend = [f"{goal.heading}: {goal.note}" for goal in GOALS.values()]
    attacks = dict.fromkeys(names.metric(name) for name in summary.attack)
    table.legend += [f"{metric.heading}: {metric.note}" for metric in attacks if metric.note]
    used = {mark for label, *_ in table.rows for mark in label.split()}
    table.legend += [text for mark, text in names.MARKS.items() if mark in used]
    return table


def _cell(row: pd.Series, name: str) -> Cell:
    if pd.isna(row[name]):
        return Cell(MISSING)
    bound = row[f"{name}_bound"]
    text = fixed(row[name], 2) + ("" if pd.isna(bound) else f" ({GOALS[name].sign} {fixed(bound, 3)})")
    return Cell(text, row[name], row[f"{name}_half_width"], best=meets(row, name))


def erasure_frontier(summary: pd.DataFrame) -> plt.Figure:
    """Draws the table of `goals`, in a column per objective. Above: robustness (1 for the retrained model) over compute
    (1 for its training). Below: retain accuracy over the excess (0 for the retrained model). A point is the mean of a
    method, with 95 % intervals over base models. Bands are goals."""
    summary = summary[(summary.objective != NO_OBJECTIVE) | (summary.method == "retrained")]
    unlearned = summary[summary.method != "retrained"]
    objectives = names.objectives_of(unlearned)
    if not objectives:
        return nothing("no run was unlearned and attacked")
    if unlearned[["compute", "robustness"]].isna().all(axis=None):
        return nothing("neither the original models nor the tokens of the retrained ones were measured")
    widths = [unlearned[unlearned.objective == objective].method.nunique() ** 0.5 for objective in objectives]
    size = PAPER_WIDTH * (0.62 if len(objectives) == 1 else 1.0), 4.0
    layout = dict(figsize=size, width_ratios=widths, sharex="row", sharey="row", squeeze=False)
    with house_style():
        figure, (above, below) = plt.subplots(2, len(objectives), **layout)
        for row, (x, y) in ((above, ("compute", "robustness")), (below, ("excess", "retained"))):
            for axes, objective in zip(row, objectives, strict=True):
                for each in summary[summary.objective.isin([objective, NO_OBJECTIVE])].to_dict("records"):
                    bars = {"xerr": each[f"{x}_half_width"], "yerr": each[f"{y}_half_width"], "elinewidth": 0.4}
                    axes.errorbar(each[x], each[y], **bars, linestyle="", **names.look_of(each["method"], size=4.5))
        for axes, objective in zip(above, objectives, strict=True):
            axes.axvspan(1e-9, GOALS["compute"].level, color="0.93", linewidth=0, zorder=0)
            left = min(0.02, 0.8 * summary.compute.min())
            axes.set(title=names.objective_label(objective), xscale="log", xlim=(left, 1.5))
            axes.set(xticks=(0.1, 1), xticklabels=("0.1", "1"), ylim=(min(-0.1, summary.robustness.min() - 0.05), 1.15))
        for axes in below:
            band = dict(color="black", alpha=0.07, linewidth=0, zorder=0)  # darker where both goals are met
            axes.axhspan(GOALS["retained"].level, 2, **band)
            axes.axvspan(-1, GOALS["excess"].level, **band)
            axes.set(xlim=(-0.1, max(0.5, summary.excess.max() + 0.05)), xticks=(0, 0.2, 0.4))
            axes.set(ylim=(min(0.84, summary.retained.min() - 0.02), max(1.02, summary.retained.max() + 0.02)))
        above[0].set_ylabel("robustness (retrained = 1)")
        below[0].set_ylabel("retain accuracy (original = 1)")
        middle = {"x": 0.5 if len(objectives) % 2 else 0}
        above[len(above) // 2].set_xlabel("tokens of training (retraining = 1)", **middle)
        below[len(below) // 2].set_xlabel("excess (retrained = 0)", **middle)
        for method in names.ordered(set(summary.method)):
            above[0].plot([], [], linestyle="", label=names.method_label(method), **names.look_of(method))
        above[0].plot([], [], color="0.88", linewidth=5, label="goals")
        legend_below(figure, above[0])
    return figure
