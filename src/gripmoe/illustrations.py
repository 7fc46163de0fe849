"""Figures of the method itself, drawn from the geometry as it computes: a schematic, and what happens inside a run."""

from __future__ import annotations

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz, violation
from gripmoe.geometry.nullspace import EpsNull, RetainStatistics
from gripmoe.reporting import labels
from gripmoe.reporting.figures import PAPER_WIDTH, house_style


def method_schematic() -> tuple[plt.Figure, pd.DataFrame]:
    """One router row in the plane and in space. Left: tokens that do not select its expert bound how far the row may
    move; Algorithm 1's draws end at some point near the region, the exact projection at the nearest one in it. Right:
    a token that does select it leaves one plane; Stage 2 along raw tokens leaves that plane, along projected ones it
    does not. Returns the points too."""
    no_basis = RetainStatistics(1, 2).basis(EpsNull(1e-4, "relative"))
    tokens = torch.tensor([[1.0, 0.25], [0.35, 1.0], [0.9, -0.7]], dtype=torch.float64)
    bounds = torch.tensor([[0.8], [0.7], [0.75]], dtype=torch.float64)
    step = torch.tensor([[1.9, 1.3]], dtype=torch.float64)
    path = [step]
    for draws in range(1, 9):
        generator = torch.Generator().manual_seed(3)
        path.append(randomized_kaczmarz(step, tokens, bounds, max_steps=draws, tolerance=1e-4, generator=generator))
    exact = nearest_feasible(step, no_basis, tokens, bounds)

    held = torch.tensor([[0.5, -0.4, 1.0]], dtype=torch.float64)
    others = torch.tensor([[1.0, 0.2, 0.5], [0.3, 1.0, 0.3]], dtype=torch.float64)
    limits = torch.tensor([[0.5], [0.5]], dtype=torch.float64)
    statistics = RetainStatistics(1, 3).update(held, torch.ones(1, 1, dtype=torch.bool))
    basis = statistics.basis(EpsNull(1e-4, "relative"))
    raw_step = torch.tensor([[1.3, 1.1, 0.9]], dtype=torch.float64)
    stage_1 = basis.project(raw_step)
    generator = torch.Generator().manual_seed(0)
    stage_2 = randomized_kaczmarz(stage_1, others, limits, max_steps=60, tolerance=1e-6, generator=generator)
    sound = nearest_feasible(raw_step, basis, others, limits)
    points = {"step": raw_step, "Stage 1": stage_1, "Stage 2, paper": stage_2, "both, exact": sound}
    moved = pd.DataFrame(
        [
            {
                "point": name,
                "held score moved": abs((u @ held.T).item()),
                "worst violation": violation(u, others, limits).item(),
                "distance from Stage 1": (u - stage_1).norm().item(),
            }
            for name, u in points.items()
        ]
    )

    with house_style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(PAPER_WIDTH, 2.5), width_ratios=[1, 1.15])
        grid = np.linspace(-0.7, 2.3, 300)
        x, y = np.meshgrid(grid, grid)
        inside = np.ones_like(x, dtype=bool)
        for (a, b), limit in zip(tokens.tolist(), bounds[:, 0].tolist(), strict=True):
            inside &= a * x + b * y <= limit
            left.plot(grid, (limit - a * grid) / b, color="0.55", linewidth=0.7)
        left.contourf(x, y, inside, levels=[0.5, 1.5], colors=["#d9efe6"])
        walk = torch.cat(path)
        left.plot(*walk.T, color=labels.colour("ptc_paper"), marker="o", markersize=2, label="Algorithm 1, each draw")
        left.plot(*exact[0], "*", color=labels.colour("expert_specific"), markersize=9, label="exact projection")
        left.plot(*step[0], "s", color=labels.colour("unconstrained"), markersize=4, label="what the optimizer did")
        left.set(xlim=(-0.6, 2.1), ylim=(-0.6, 1.7), xticks=[], yticks=[], aspect="equal")
        left.set_title("Margins bound a row of the router")
        left.text(-0.5, -0.45, "selections unchanged", fontsize=6, color="0.35")
        left.legend(frameon=False, fontsize=5.8, loc="upper left", bbox_to_anchor=(-0.02, -0.02))
        heights = np.arange(len(moved))
        right.barh(heights + 0.2, moved["held score moved"], 0.36, color=labels.colour("unconstrained"))
        right.barh(heights - 0.2, moved["worst violation"], 0.36, color=labels.colour("frozen_router"))
        right.set_yticks(heights, moved["point"])
        right.invert_yaxis()
        right.set_title("... and selected scores must not move")
        right.set_xlabel("by how much a selection is endangered")
        right.text(0.97, 0.30, "score of a held token moved", color=labels.colour("unconstrained"), fontsize=5.8,
                   transform=right.transAxes, ha="right")  # fmt: skip
        right.text(0.97, 0.22, "margin of another exceeded", color=labels.colour("frozen_router"), fontsize=5.8,
                   transform=right.transAxes, ha="right")  # fmt: skip
        figure.tight_layout(w_pad=2)
    return figure, moved


def kaczmarz_convergence(seed: int = 0) -> pd.DataFrame:
    """Worst remaining violation after so many draws of Algorithm 1, and of the exact solution, on random tokens of the
    embedded world's size (d = 128, 16 experts, 400 tokens with a margin each): median over rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, 128, generator=generator, dtype=torch.float64)
    bounds = 0.1 * torch.rand(400, 16, generator=generator, dtype=torch.float64)
    step = 0.02 * torch.randn(16, 128, generator=generator, dtype=torch.float64)
    rows = []
    for draws in (0, 1, 3, 10, 30, 100, 300, 1000, 3000):
        u = step
        if draws:
            again = torch.Generator().manual_seed(seed + 1)
            u = randomized_kaczmarz(step, x, bounds, max_steps=draws, tolerance=0.0, generator=again)
        rows.append({"draws": draws, "violation": violation(u, x, bounds).median().item()})
    exact = nearest_feasible(step, RetainStatistics(1, 128).basis(EpsNull(1e-4, "relative")), x, bounds)
    rows.append({"draws": -1, "violation": violation(exact, x, bounds).median().item()})
    return pd.DataFrame(rows)


def mechanism(histories: pd.DataFrame, runs: pd.DataFrame) -> tuple[plt.Figure, pd.DataFrame]:
    """What happens inside: gradient per element of routers and experts while nothing is constrained; the dimensions
    that Method A leaves free; how Algorithm 1 converges. Returns the numbers behind it too."""
    free = histories[
        (histories.method == "unconstrained") & histories.metric.isin(["router_gradient", "expert_gradient"])
    ]
    gradients = free.groupby(["objective", "metric", "step"]).value.mean()
    ranks = runs[runs.metric.str.fullmatch(r"mean_rank_layer_\d+")].copy()
    ranks["layer"] = ranks.metric.str.extract(r"(\d+)$").astype(int)
    hidden = runs.loc[runs.metric == "hidden_size", "value"].max()
    ranks["free"] = hidden - ranks.value
    dimensions = ranks.groupby(["method", "layer"]).free.mean()
    convergence = kaczmarz_convergence()
    with house_style():
        styles = {"router_gradient": "-", "expert_gradient": "--"}
        objectives = list(dict.fromkeys(gradients.index.get_level_values("objective")))
        methods = list(dict.fromkeys(dimensions.index.get_level_values("method")))
        legend = 0.1 * max(len(objectives), len(methods))  # inches below the panels
        figure, (first, second, third) = plt.subplots(1, 3, figsize=(PAPER_WIDTH, 1.9 + legend))
        for objective, colour in zip(objectives, ("0.0", "0.35", "0.55", "0.75"), strict=False):
            for metric, style in styles.items():
                line = gradients[objective, metric]
                name = f"{labels.OBJECTIVES[objective]}, {metric.split('_')[0]}"
                first.plot(line.index, line.values, style, color=colour, linewidth=1, label=name)
        first.set_yscale("log")
        first.set(xlabel="step", title="RMS gradient per element")
        for method, marker in zip(methods, itertools.cycle("os^vDP*X"), strict=False):
            line = dimensions[method]
            look = {"color": labels.colour(method), "linestyle": labels.line_style(method), "marker": marker}
            second.plot(line.index, line.values, markersize=2.5, label=labels.method_label(method), **look)
        second.set(xlabel="MoE layer", title=f"free of {hidden:.0f} dimensions")
        second.set_xticks(sorted(set(dimensions.index.get_level_values("layer"))))
        drawn = convergence[convergence.draws >= 0]
        third.plot(
            drawn.draws.clip(lower=0.5), drawn.violation, marker="o", markersize=2.5, color=labels.colour("ptc_paper")
        )
        exact = convergence.loc[convergence.draws < 0, "violation"].iloc[0]
        third.axhline(exact, color=labels.colour("expert_specific"), linewidth=1)
        third.axvline(100, color="0.6", linewidth=0.7, linestyle=":")
        third.text(110, drawn.violation.max() * 0.93, "k_max", fontsize=5.5, color="0.4")
        third.text(0.6, exact + 0.03 * drawn.violation.max(), "exact projection", fontsize=5.5,
                   color=labels.colour("expert_specific"))  # fmt: skip
        third.set_xscale("log")
        third.set(xlabel="draws of Algorithm 1", title="violation left")
        for panel, columns in ((first, 2), (second, 1)):
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.36), "ncol": columns, "columnspacing": 0.8}
            if panel.lines:
                panel.legend(frameon=False, fontsize=5, labelspacing=0.15, **below)
        figure.tight_layout(w_pad=1.2)
    numbers = pd.concat(
        [
            gradients.rename("value").reset_index().assign(panel="gradient"),
            dimensions.rename("value").reset_index().assign(panel="free dimensions"),
            convergence.rename(columns={"violation": "value"}).assign(panel="convergence"),
        ]
    )
    return figure, numbers
