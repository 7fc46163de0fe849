"""Figures of the mechanism. The geometry itself computes two, the schematic and the rate of Theorem C.1. Tables of runs
give the other two, the inside of a run and Method B's fit."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from gripmoe.reporting import names
from gripmoe.reporting.figures import PAPER_WIDTH, house_style, nothing
from gripmoe.reporting.runs import apart


def method_schematic(example: dict) -> tuple[plt.Figure, pd.DataFrame]:
    """One router row with two and with three dimensions, as `gripmoe.geometry.example` computes it. Left: tokens that
    do not select the expert bound the displacement of the row. Algorithm 1's draws end near the feasible region, the
    exact projection at its nearest point. Right: a token that selects the expert restricts the row to a plane. Stage 2
    along raw tokens leaves the plane; Stage 2 along projected tokens does not. Also returns the points."""
    plane, moved = example["plane"], pd.DataFrame(example["space"])
    draws, exact, raw, other = map(names.colour, ("ptc_paper", "expert_specific", "unconstrained", "frozen_router"))
    with house_style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(PAPER_WIDTH, 2.5), width_ratios=[1, 1.15])
        grid = np.linspace(-0.7, 2.3, 300)
        x, y = np.meshgrid(grid, grid)
        inside = np.ones_like(x, dtype=bool)
        for (a, b), limit in zip(plane["tokens"], plane["bounds"], strict=True):
            inside &= a * x + b * y <= limit
            left.plot(grid, (limit - a * grid) / b, color="0.55", linewidth=0.7)
        left.contourf(x, y, inside, levels=[0.5, 1.5], colors=["#d9efe6"])
        walk = np.array(plane["walk"])
        left.plot(*walk.T, color=draws, marker="o", markersize=2, label="Algorithm 1, each draw")
        left.plot(*plane["exact"], "*", color=exact, markersize=9, label="exact projection")
        left.plot(*walk[0], "s", color=raw, markersize=4, label="what the optimizer did")
        left.set(xlim=(-0.6, 2.1), ylim=(-0.6, 1.7), xticks=[], yticks=[], aspect="equal")
        left.set_title("Margins bound a row of the router")
        left.text(-0.5, 0.05, "selections\nunchanged", fontsize=6, color="0.35", va="center")
        left.legend(frameon=False, fontsize=5.8, loc="upper left", bbox_to_anchor=(-0.02, -0.02))
        heights = np.arange(len(moved))
        bars = (
            ("fixed score moved", raw, 0.2, 0.30, "score of a fixed token moved"),
            ("worst violation", other, -0.2, 0.22, "margin of another exceeded"),
        )
        right.set_xlim(0, 1.15 * moved[[column for column, *_ in bars]].to_numpy().max())
        for column, colour, above, place, name in bars:
            look = dict(color=colour, fontsize=5.8)
            right.barh(heights + above, moved[column], 0.36, color=colour)
            for height, value in zip(heights + above, moved[column], strict=True):  # else a bar of zero seems missing
                right.text(value + 0.02, height, f"{value:.2g}" if value > 1e-6 else "0", va="center", **look)
            right.text(0.97, place, name, transform=right.transAxes, ha="right", **look)
        right.set_yticks(heights, moved["point"])
        right.invert_yaxis()
        right.set_title("... and selected scores must not move")
        right.set_xlabel("by how much a selection is endangered")
        figure.tight_layout(w_pad=2)
    return figure, moved


def kaczmarz_rate(rate: dict) -> plt.Figure:
    """Theorem C.1: the distance to the feasible set by number of draws of Algorithm 1, and its bound."""
    with house_style():
        figure, axes = plt.subplots(figsize=(0.6 * PAPER_WIDTH, 2.2))
        axes.semilogy(rate["bound"], color="0.4", linestyle="--", label="bound of Theorem C.1")
        axes.semilogy(rate["distance"], color=names.colour("ptc_paper"), label="Algorithm 1, mean of walks")
        axes.set(xlabel="draws", ylabel="squared distance to the feasible set", title="Algorithm 1 in the plane")
        axes.legend(frameon=False)
        figure.tight_layout()
    return figure


def mechanism(histories: pd.DataFrame, runs: pd.DataFrame) -> tuple[plt.Figure, pd.DataFrame]:
    """The inside of a run, for each kind of base model and the methods of `names.drawn`: the gradient per element of
    routers and experts in unconstrained training; the free dimensions under Method A (for fixed bases with range and
    quartiles over experts); how often Stage 1 is not enough; and the violations of finished routers that remain after
    Algorithm 1, beside the exact projection. Also returns the numbers, for all methods."""
    if not ((histories.method == "unconstrained") | (histories.metric == "stage_2_rate")).any():
        return nothing("no run without a constraint or under Method A"), pd.DataFrame(columns=["panel", "value"])
    kinds = apart(histories)
    numbers = []
    with house_style():
        figure, grid = plt.subplots(2 * len(kinds), 2, figsize=(PAPER_WIDTH, 4.6 * len(kinds)), squeeze=False)
        for panels, (kind, checks) in zip(np.split(grid, len(kinds)), kinds, strict=True):
            of_kind = runs[runs.model.isin(checks.model) & runs.benchmark.isin(checks.benchmark)]
            numbers.append(_draw_mechanism(panels, checks, of_kind).assign(kind=kind))
            if kind:
                panels[0, 0].annotate(kind, (0, 1.14), xycoords="axes fraction", weight="bold")
        figure.tight_layout(w_pad=1.2, h_pad=1.5)
    return figure, pd.concat(numbers)


def _draw_mechanism(panels: np.ndarray, histories: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    of_gradients = histories.metric.isin(["router_gradient", "expert_gradient"])
    free = histories[(histories.method == "unconstrained") & of_gradients]
    gradients = free.groupby(["objective", "metric", "step"]).value.mean()
    dimensions = _free_dimensions(histories, runs)
    triggered = histories[histories.metric == "stage_2_rate"].groupby(["method", "step"]).value.mean()
    left = runs[runs.metric.str.match("violation_(after|exact)")]
    left = left.assign(draws=left.metric.str.extract(r"(\d+)$")[0]).groupby("draws", dropna=False).value.mean()
    _draw_gradients(panels[0, 0], gradients)
    _draw_dimensions(panels[0, 1], dimensions)
    _draw_triggered(panels[1, 0], triggered)
    _draw_left(panels[1, 1], left)
    for axes in panels.flat[:3]:
        if axes.lines:
            many = len(axes.get_legend_handles_labels()[1]) > 3
            place = dict(loc="center left", bbox_to_anchor=(1.0, 0.5)) if many else dict(loc="best")
            axes.legend(frameon=False, fontsize=5.8, labelspacing=0.2, **place)
    return pd.concat(
        [
            gradients.rename("value").reset_index().assign(panel="gradient"),
            dimensions.assign(panel="free dimensions"),
            triggered.rename("value").reset_index().assign(panel="stage 2"),
            left.rename("value").reset_index().assign(panel="violation left"),
        ]
    )


def _free_dimensions(histories: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Free dimensions by method and layer: the mean over experts, and quantiles for fixed bases."""
    fixed = runs[runs.metric.str.fullmatch(r"(mean_rank|rank_\d+)_layer_\d+")]
    of_steps = histories[histories.metric.str.fullmatch(r"rank_layer_\d+") & ~histories.method.isin(fixed.method)]
    ranks = pd.concat([fixed, of_steps.assign(metric="mean_" + of_steps.metric)])
    found = ranks.metric.str.extract(r"(?P<of>mean|\d+).*_layer_(?P<layer>\d+)$")
    ranks = ranks.assign(of=found.of, layer=found.layer.astype(int))
    ranks = ranks[~ranks.method.map(names.is_swept).astype(bool)]  # a sweep has a table of its own
    means = ranks.groupby(["method", "layer", "of"]).value.mean()
    hidden = runs.loc[runs.metric == "hidden_size", "value"].max()
    return (hidden - means).unstack("of").reset_index()


def _draw_gradients(axes: plt.Axes, gradients: pd.Series) -> None:
    objectives = list(dict.fromkeys(gradients.index.get_level_values("objective")))
    for objective, grey in zip(objectives, np.linspace(0.0, 0.75, len(objectives)), strict=True):
        for metric, style in {"router_gradient": "-", "expert_gradient": "--"}.items():
            line = gradients[objective, metric]
            name = f"{names.objective_label(objective)}, {metric.split('_')[0]}"
            axes.plot(line.index, line.values, style, color=str(grey), linewidth=1, label=name)
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="RMS per element", title="gradients")


def _draw_dimensions(axes: plt.Axes, dimensions: pd.DataFrame) -> None:
    dimensions = dimensions[dimensions.method.isin(names.drawn(dimensions.method))]
    for number, (method, rows) in enumerate(dimensions.groupby("method")):
        look = dict(linestyle=names.line_style(method), **names.look_of(method, size=2.5))
        x = rows.layer + 0.06 * number
        if "50" in rows and rows["50"].notna().all():
            axes.vlines(x, rows["0"], rows["100"], color=look["color"], linewidth=0.5)
            axes.vlines(x, rows["25"], rows["75"], color=look["color"], linewidth=1.8)
        axes.plot(x, rows["mean"], label=names.method_label(method), **look)
    axes.set(xlabel="MoE layer", ylabel="dimensions", title="left free by Method A")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend, which does not evade `vlines`
    axes.set_xticks(sorted(set(dimensions.layer)))


def _draw_triggered(axes: plt.Axes, triggered: pd.Series) -> None:
    for method in names.drawn(triggered.index.get_level_values("method")):
        line = triggered[method]
        style = names.line_style(method)
        axes.plot(line.index, line.values, style, color=names.colour(method), label=names.method_label(method))
    axes.set(xlabel="step", ylabel="share of router rows", title="in need of Stage 2", ylim=(-0.02, 1.02))


def _draw_left(axes: plt.Axes, left: pd.Series) -> None:
    """Draws `left` over the number of draws; the exact projection has no number."""
    axes.set(xlabel="draws of Algorithm 1", ylabel="share that is left", title="margins exceeded", ylim=(-0.03, 1.03))
    if left.empty:
        return
    drawn = left[left.index.notna()]
    drawn = drawn.set_axis(drawn.index.astype(int)).sort_index()
    axes.plot(drawn.index, drawn.values, marker="o", markersize=2.5, color=names.colour("ptc_paper"))
    axes.axhline(left[left.index.isna()].iloc[0], color=names.colour("expert_specific"), linewidth=1)
    axes.axvline(100, color="0.6", linewidth=0.7, linestyle=":")
    axes.text(130, 0.95, "$k_{max}$", fontsize=5.5, color="0.4")
    axes.text(1, 0.04, "exact projection", fontsize=5.5, color=names.colour("expert_specific"))
    axes.set_xscale("log")


def realignment_holdout(runs: pd.DataFrame) -> plt.Figure:
    """Method B by the number of fitted tokens: routing stability on these tokens and on others, for the paper's form
    and the sound form. The hidden size is marked."""
    found = runs[runs.metric.str.startswith("holdout_")].copy()
    if found.empty:
        return nothing("no finished run was refitted in the paper's form (ptc_paper)")
    found[["form", "tokens", "where"]] = found.metric.str.extract(r"holdout_(paper|sound)_(\d+)_(fit|other)")
    found["tokens"] = found.tokens.astype(int)
    kinds = apart(found)
    with house_style():
        size = PAPER_WIDTH * (0.62 if len(kinds) == 1 else 1.0), 2.2
        figure, (panels,) = plt.subplots(1, len(kinds), figsize=size, sharey=True, squeeze=False)
        for axes, (kind, group) in zip(panels, kinds, strict=True):
            means = group.groupby(["form", "where", "tokens"]).value.mean()
            for form, method in (("paper", "ptc_paper"), ("sound", "ptc")):
                for where, style in (("fit", ":"), ("other", "-")):
                    line = means[form, where]
                    name = f"{form}, {'its own' if where == 'fit' else 'other'} tokens"
                    axes.plot(line.index, line.values, style, label=name, **names.look_of(method))
            hidden = runs.loc[(runs.metric == "hidden_size") & runs.model.isin(group.model), "value"]
            if not hidden.empty:
                axes.axvline(hidden.iloc[0], color="0.6", linewidth=0.7, linestyle="--")
                axes.text(hidden.iloc[0] * 1.1, 0.02, "$N_r = d$", fontsize=5.8, color="0.4")
            axes.set_xscale("log", base=2)
            axes.set(xlabel="retain tokens fitted to", ylim=(0, 1.03), title=kind)
        panels[0].set_ylabel("routing stability")
        panels[-1].legend(frameon=False, fontsize=5.8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.tight_layout()
    return figure
