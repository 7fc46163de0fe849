"""Which methods erase, keep the rest and cost little: four goals, and how far each method is shown to be from them."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import matplotlib.pyplot as plt
import pandas as pd

from gripmoe.config.grid import NO_OBJECTIVE
from gripmoe.reporting import names
from gripmoe.reporting.collect import KEYS
from gripmoe.reporting.erasure import ATTACKS
from gripmoe.reporting.figures import PAPER_WIDTH, house_style, legend_below, nothing
from gripmoe.reporting.tables import Cell, Table
from gripmoe.reporting.uncertainty import LEAST, p_above, student


@dataclass(frozen=True)
class Goal:
    heading: str
    note: str
    level: float
    is_upper: bool  # the measure is to stay below the level


GOALS = {
    "excess": Goal(
        "excess", "forget accuracy beyond the retrained model's, under the attack that returns most", 0.05, True
    ),
    "retained": Goal("retained", "retain accuracy, as a share of the original's", 0.95, False),
    "routing": Goal("RS", "routing stability", 0.94, False),
    "compute": Goal("compute", "tokens of unlearning, as a share of those of training the retrained model", 0.2, True),
}
MEASURES = (*GOALS, "robustness", "attacked")


def goals(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per objective and method, over the base models that have a retrained model. `<measure>` is the mean over
    base models, `<measure>_half_width` of its 95 % interval, and `<measure>_bound` its one-sided 95 % bound towards the
    goal. The last two need LEAST base models. Beside those of GOALS, measures are `attacked`, the forget accuracy under
    the attack that returns most, and `robustness`, 1 for the retrained and 0 for the original model under the attack of
    `excess`.

    An excess is a mean under one attack, and `excess` is the highest of these means. Its bound is the highest bound of
    any attack, which `attack` names. `excess_p` is the highest p of the hypotheses that the excess under an attack is
    above the goal. All attacks have to reject it, so that their number needs no correction."""
    wide = runs.pivot_table(index=KEYS, columns="metric", values="value").groupby(KEYS[:-1]).mean().reset_index()
    wide = wide.set_index(["model", "benchmark"])
    attacks = [name for name in ATTACKS if name in wide]
    original, retrained = (wide[wide.method == name] for name in names.ORIGINALS)
    rows = []
    for (objective, method), found in wide[wide.method != "original"].groupby(["objective", "method"]):
        before, never = original.reindex(found.index), retrained.reindex(found.index)
        excess = (found[attacks] - never[attacks]).dropna(axis="columns", how="any")
        if excess.columns.empty:
            continue
        worst, most = excess.mean().idxmax(), found[attacks].mean().idxmax()
        values = {
            "excess": excess[worst],
            "robustness": 1 - excess[worst] / (before[worst] - never[worst]).mean(),
            "attacked": found[most],
            "retained": found.retain_accuracy / before.retain_accuracy,
            "routing": found.get("routing_stability"),
            "compute": found.tokens / never.tokens if "tokens" in found else None,
        }
        row = {"objective": objective, "method": method, "base_models": len(excess)}
        for name in MEASURES:
            row |= _summary(name, values[name])
        bounds = excess.apply(lambda values: _summary("excess", values)["excess_bound"])
        level = GOALS["excess"].level
        row |= {"excess_bound": bounds.max(), "attack": worst if bounds.isna().all() else bounds.idxmax()}
        row |= {"excess_p": max(p_above(-excess[name], -level) / 2 for name in excess)}
        rows.append(row)
    return pd.DataFrame(rows)


def _summary(name: str, values: pd.Series | None) -> dict[str, float]:
    values = pd.Series(dtype=float) if values is None else values.dropna()
    half_width = bound = nan
    if len(values) >= LEAST:
        half_width, one_sided = student(values), student(values, level=0.9)
        bound = values.mean() + (one_sided if name in GOALS and GOALS[name].is_upper else -one_sided)
    return {name: values.mean(), f"{name}_half_width": half_width, f"{name}_bound": bound}


def meets(row: pd.Series | dict, name: str) -> bool:
    """Whether the bound of a row of `goals` shows that the method meets a goal."""
    goal, bound = GOALS[name], row[f"{name}_bound"]
    return bool(bound <= goal.level if goal.is_upper else bound >= goal.level)


def goals_table(runs: pd.DataFrame) -> Table:
    """A row per method under each objective, with its mean and bound for each goal; bold if the bound meets it."""
    found = goals(runs)
    table = Table([*(goal.heading for goal in GOALS.values()), "attack"])
    if found.empty:
        return table
    found = found[found.method != "retrained"].set_index(["objective", "method"])
    for objective in [NO_OBJECTIVE, *names.objectives_of(found.reset_index())]:
        measured = found[found.index.get_level_values("objective") == objective].droplevel("objective")
        rows = []
        for method in names.ordered(measured.index):
            row = measured.loc[method]
            cells = [_cell(row, name) for name in GOALS]
            rows.append((names.method_label(method), [*cells, Cell(names.metric(row.attack).heading)], []))
        table.blocks += [(names.objective_label(objective), rows)] * bool(rows)
    numbers = " or ".join(map(str, sorted(set(found.base_models))))
    levels = [f"{goal.heading} {'≤' if goal.is_upper else '≥'} {goal.level}" for goal in GOALS.values()]
    table.notes = [
        f"Means over {numbers} base models. In brackets: the one-sided 95 % bound; of the excess, the highest of any "
        f"attack, which the last column names. Bold: the bound meets the goal, {', '.join(levels)}."
    ]
    table.legend = [f"{goal.heading}: {goal.note}" for goal in GOALS.values()]
    attacks = dict.fromkeys(names.metric(name) for name in found.attack)
    table.legend += [f"{metric.heading}: {metric.note}" for metric in attacks if metric.note]
    table.data = found.reset_index()
    return table


def _cell(row: pd.Series, name: str) -> Cell:
    if pd.isna(row[name]):
        return Cell("–")
    text, sign = f"{row[name]:.2f}", "≤" if GOALS[name].is_upper else "≥"
    if pd.notna(row[f"{name}_bound"]):
        text += f" ({sign} {row[f'{name}_bound']:.2f})"
    return Cell(text, row[name], row[f"{name}_half_width"], best=meets(row, name))


def erasure_frontier(found: pd.DataFrame) -> plt.Figure:
    """Draws the table of `goals`, in a column per objective. Above: robustness (1 for the retrained model) over compute
    (1 for its training). Below: retain accuracy over the forget accuracy under the strongest attack. A point is the
    mean of a method, with 95 % intervals over base models. Bands are goals."""
    found = found[(found.objective != NO_OBJECTIVE) | (found.method == "retrained")]
    unlearned = found[found.method != "retrained"]
    objectives = names.objectives_of(unlearned)
    if not objectives:
        return nothing("no run was unlearned and attacked")
    widths = [unlearned[unlearned.objective == objective].method.nunique() ** 0.5 for objective in objectives]
    layout = dict(figsize=(PAPER_WIDTH, 4.0), width_ratios=widths, sharex="row", sharey="row", squeeze=False)
    with house_style():
        figure, (above, below) = plt.subplots(2, len(objectives), **layout)
        for row, (x, y) in ((above, ("compute", "robustness")), (below, ("attacked", "retained"))):
            for axes, objective in zip(row, objectives, strict=True):
                for each in found[found.objective.isin([objective, NO_OBJECTIVE])].to_dict("records"):
                    bars = {"xerr": each[f"{x}_half_width"], "yerr": each[f"{y}_half_width"], "elinewidth": 0.4}
                    axes.errorbar(each[x], each[y], **bars, linestyle="", **names.look_of(each["method"], size=4.5))
        for axes, objective in zip(above, objectives, strict=True):
            axes.axvspan(0.01, GOALS["compute"].level, color="0.93", linewidth=0, zorder=0)
            axes.set(title=names.objective_label(objective), xscale="log", xlim=(0.02, 1.5), ylim=(-0.1, 1.15))
            axes.set(xticks=(0.1, 1), xticklabels=("0.1", "1"))
        for axes in below:
            axes.axhspan(GOALS["retained"].level, 2, color="0.93", linewidth=0, zorder=0)
            axes.set(xlim=(0.15, 0.95), xticks=(0.3, 0.6, 0.9), ylim=(min(0.84, found.retained.min() - 0.02), 1.02))
        above[0].set_ylabel("robustness (retrained = 1)")
        below[0].set_ylabel("retain accuracy (original = 1)")
        above[len(above) // 2].set_xlabel("tokens of training (retraining = 1)", x=0)
        below[len(below) // 2].set_xlabel("forget accuracy under the strongest attack", x=0)
        for method in names.ordered(set(found.method)):
            above[0].plot([], [], linestyle="", label=names.method_label(method), **names.look_of(method))
        above[0].plot([], [], color="0.88", linewidth=5, label="goals of compute and retain accuracy")
        legend_below(figure, above[0])
    return figure
