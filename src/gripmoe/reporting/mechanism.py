"""The method itself, from the geometry as it computes: a schematic, what happens inside a run, the cache of bases."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from math import inf
from pathlib import Path
from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz, violation
from gripmoe.geometry.nullspace import EpsNull, RetainBasis, RetainStatistics
from gripmoe.moe.bases import StoredBases
from gripmoe.moe.basis_cache import BasisStore
from gripmoe.reporting import names as labels
from gripmoe.reporting.collect import apart, load_runs
from gripmoe.reporting.figures import PAPER_WIDTH, house_style, look_of
from gripmoe.reporting.tables import MISSING, Cell, Table

TIERS = {"hot": "hot: device", "warm": "warm: host", "cold": "cold: disk"}
HOT_BASES = 8  # the paper's example
MEASURED_STEPS = 20


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
        left.text(-0.5, 0.05, "selections\nunchanged", fontsize=6, color="0.35", va="center")
        left.legend(frameon=False, fontsize=5.8, loc="upper left", bbox_to_anchor=(-0.02, -0.02))
        heights = np.arange(len(moved))
        right.set_xlim(0, 1.15 * moved[["held score moved", "worst violation"]].to_numpy().max())
        for column, method, above in (
            ("held score moved", "unconstrained", 0.2),
            ("worst violation", "frozen_router", -0.2),
        ):
            colour = labels.colour(method)
            right.barh(heights + above, moved[column], 0.36, color=colour)
            for height, value in zip(heights + above, moved[column], strict=True):  # or a bar of zero seems missing
                right.text(
                    value + 0.02,
                    height,
                    f"{value + 0.0:.2g}" if value > 1e-6 else "0",
                    va="center",
                    fontsize=5.8,
                    color=colour,
                )
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


def mechanism(histories: pd.DataFrame, runs: pd.DataFrame) -> tuple[plt.Figure, pd.DataFrame]:
    """What happens inside: gradient per element of routers and experts while nothing is constrained; the dimensions
    that Method A leaves free, where its bases are fixed with the range and quartiles over experts; how often Stage 1 is
    not enough; and what Algorithm 1 leaves of the margins that a finished run exceeds, beside the exact projection.
    Of every kind of base model by itself; drawn of methods with a colour of their own. Returns the numbers behind it
    too, those of all."""
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
    free = histories[
        (histories.method == "unconstrained") & histories.metric.isin(["router_gradient", "expert_gradient"])
    ]
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
    """By method and layer the mean, and where bases are fixed the quantiles over experts."""
    fixed = runs[runs.metric.str.fullmatch(r"(mean_rank|rank_\d+)_layer_\d+")]
    of_steps = histories[histories.metric.str.fullmatch(r"rank_layer_\d+") & ~histories.method.isin(fixed.method)]
    ranks = pd.concat([fixed, of_steps.assign(metric="mean_" + of_steps.metric)])
    found = ranks.metric.str.extract(r"(?P<of>mean|\d+).*_layer_(?P<layer>\d+)$")
    ranks = ranks.assign(of=found.of, layer=found.layer.astype(int))
    # A sweep has a table of its own.
    means = ranks[~ranks.method.map(labels.is_swept).astype(bool)].groupby(["method", "layer", "of"]).value.mean()
    hidden = runs.loc[runs.metric == "hidden_size", "value"].max()
    return (hidden - means).unstack("of").reset_index()


def _draw_gradients(axes: plt.Axes, gradients: pd.Series) -> None:
    objectives = list(dict.fromkeys(gradients.index.get_level_values("objective")))
    for objective, colour in zip(objectives, ("0.0", "0.35", "0.55", "0.75"), strict=False):
        for metric, style in {"router_gradient": "-", "expert_gradient": "--"}.items():
            line = gradients[objective, metric]
            name = f"{labels.objective_label(objective)}, {metric.split('_')[0]}"
            axes.plot(line.index, line.values, style, color=colour, linewidth=1, label=name)
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="RMS per element", title="gradients")


def _draw_dimensions(axes: plt.Axes, dimensions: pd.DataFrame) -> None:
    dimensions = dimensions[dimensions.method.isin(labels.COLOURS)]
    for number, (method, rows) in enumerate(dimensions.groupby("method")):
        look = {"linestyle": labels.line_style(method), **look_of(method, size=2.5)}
        x = rows.layer + 0.06 * number
        if "50" in rows and rows["50"].notna().all():
            axes.vlines(x, rows["0"], rows["100"], color=look["color"], linewidth=0.5)
            axes.vlines(x, rows["25"], rows["75"], color=look["color"], linewidth=1.8)
        axes.plot(x, rows["mean"], label=labels.method_label(method), **look)
    axes.set(xlabel="MoE layer", ylabel="dimensions", title="left free by Method A", ylim=(0, None))
    axes.set_xticks(sorted(set(dimensions.layer)))


def _draw_triggered(axes: plt.Axes, triggered: pd.Series) -> None:
    for method in [m for m in labels.COLOURS if m in triggered.index.get_level_values("method")]:
        line = triggered[method]
        look = {"color": labels.colour(method), "linestyle": labels.line_style(method)}
        axes.plot(line.index, line.values, label=labels.method_label(method), **look)
    axes.set(xlabel="step", ylabel="share of router rows", title="in need of Stage 2", ylim=(-0.02, 1.02))


def _draw_left(axes: plt.Axes, left: pd.Series) -> None:
    """`left` by draws, as text; the exact projection's has none."""
    axes.set(xlabel="draws of Algorithm 1", ylabel="share that is left", title="margins exceeded", ylim=(-0.03, 1.03))
    if left.empty:
        return
    drawn = left[left.index.notna()]
    drawn = drawn.set_axis(drawn.index.astype(int)).sort_index()
    axes.plot(drawn.index, drawn.values, marker="o", markersize=2.5, color=labels.colour("ptc_paper"))
    axes.axhline(left[left.index.isna()].iloc[0], color=labels.colour("expert_specific"), linewidth=1)
    axes.axvline(100, color="0.6", linewidth=0.7, linestyle=":")
    axes.text(130, 0.95, "$k_{max}$", fontsize=5.5, color="0.4")
    axes.text(1, 0.04, "exact projection", fontsize=5.5, color=labels.colour("expert_specific"))
    axes.set_xscale("log")


def basis_cache(runs: Path, method: str = "expert_specific") -> Table:
    """What the tiers of App. D hold and serve under several limits, measured on the bases that lie beside the table of
    `runs`: of the first of its models that has them."""
    table = Table(["limit, MB", "held, MB", "of the model", "served", "µs each"], [], heading="Tier")
    pairs = load_runs(runs, kind=None)[["model", "benchmark"]].drop_duplicates().itertuples(index=False)
    files = {pair: runs.parent / pair.model / pair.benchmark / "bases" / f"{method}.safetensors" for pair in pairs}
    found = next(((pair.model, file) for pair, file in files.items() if file.exists()), None)
    if found is None:
        table.notes = ["Not measured: no bases lie beside the table of runs."]
        return table
    model, file = found
    stored = StoredBases(file, {}).items()
    bases = {layer: RetainBasis(basis.U_ret_Edr.float()) for layer, basis in stored}  # as the file has them
    ranks_E = torch.cat([basis.ranks for basis in bases.values()]).sort().values
    some = next(iter(bases.values())).U_ret_Edr
    hidden, column = some.shape[1], some.shape[1] * some.element_size()  # bytes of one
    total, hot = (int(ranks.sum()) * column for ranks in (ranks_E, ranks_E[-HOT_BASES:]))
    of_model = sum(weights.stat().st_size for weights in (runs.parent / "models" / model).rglob("*.safetensors"))
    for name, limits in (
        ("No limit", {"hot": inf, "warm": inf}),
        (f"{HOT_BASES} bases hot, as in the paper, and all warm", {"hot": hot, "warm": inf}),
        (f"{HOT_BASES} hot, half of all warm", {"hot": hot, "warm": total / 2}),
    ):
        held, served, seconds = _accesses(bases, limits)
        entries = []
        for tier, label in TIERS.items():
            limit, share = limits.get(tier, inf), served[tier] / served.total()
            cells = [
                Cell(MISSING) if limit == inf else _megabytes(limit),
                _megabytes(held[tier]),
                Cell(f"{held[tier] / of_model:.1%}", held[tier] / of_model) if of_model else Cell(MISSING),
                Cell(f"{share:.0%}", share),
                Cell(MISSING),
            ]
            if served[tier]:
                cells[-1] = Cell(f"{1e6 * seconds[tier] / served[tier]:.1f}", 1e6 * seconds[tier] / served[tier])
            entries.append((label, cells, []))
        table.blocks.append((name, entries))
    dense = hidden * column * len(ranks_E) / 1e6
    table.notes = [
        f"{labels.method_label(method)} on {model}: {len(ranks_E)} bases of {ranks_E.double().mean():.0f} of {hidden}"
        f" dimensions in the mean, {total / 1e6:.2f} MB; as dense projectors {dense:.2f} MB.",
        f"served: share of the accesses of {MEASURED_STEPS} steps, each of which asks for every expert of every layer,"
        " in the same order; on a CPU, where hot and warm are the same memory. – no limit, or nothing served.",
    ]
    return table


def _megabytes(size: float) -> Cell:
    return Cell(f"{size / 1e6:.2f}", size / 1e6)


def _accesses(
    bases: Mapping[int, RetainBasis], limits: dict[str, float]
) -> tuple[dict[str, int], Counter[str], Counter[str]]:
    """Bytes held, accesses served and their seconds by tier, when every step asks as training does; without the first,
    which finds nothing."""
    keys = [(layer, expert) for layer, basis in bases.items() for expert in range(len(basis.U_ret_Edr))]
    seconds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        store = BasisStore(
            Path(folder), list(bases), bases.__getitem__, {}, hot_bytes=limits["hot"], warm_bytes=limits["warm"]
        )
        for layer in store:
            store[layer]
        on_disk = store.counts["bytes_written"]
        store.counts.clear()
        for key in keys * MEASURED_STEPS:
            before, start = store.counts.copy(), perf_counter()
            store.of(key)
            took = perf_counter() - start
            seconds[next(tier for tier in TIERS if store.counts[tier] > before[tier])] += took
    served = Counter({tier: store.counts[tier] for tier in TIERS})
    return {**store.held_bytes, "cold": on_disk}, served, seconds
