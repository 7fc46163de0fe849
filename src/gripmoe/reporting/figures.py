"""Figures in one house style: sizes of a paper column, embedded fonts, direct labels, one colour per method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from PIL import Image

from gripmoe.io.files import atomic_path
from gripmoe.reporting import names
from gripmoe.reporting.runs import KEYS, apart
from gripmoe.reporting.scores import FOUR_WAY, expected_overlap
from gripmoe.reporting.sources import made_of

CURVE_POINTS = 100
OF_LAYERS = r"routing_stability_layer_\d+"  # metrics
PAPER_WIDTH = 5.5  # inches: the text width of the paper
HOUSE_STYLE = {  # small sans type, thin axes without a box, fonts embedded as outlines that stay text
    **{"font.family": "DejaVu Sans", "font.size": 7, "axes.titlesize": 8, "axes.labelsize": 7, "axes.linewidth": 0.6},
    **{f"{axis}tick.{name}": size for axis in "xy" for name, size in (("major.width", 0.6), ("labelsize", 6.5))},
    **{"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.2},
    **{"pdf.fonttype": 42, "savefig.dpi": 300},
}


def house_style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(HOUSE_STYLE)


def save_figure(figure: plt.Figure, stem: Path, *tables: Path) -> None:
    """Writes .pdf and .png beside `stem`, whatever its suffix. Their metadata say what they were made of, beginning
    with the `tables`. The same content gives the same bytes."""
    source = made_of(tables)
    kinds = {
        ".pdf": {"CreationDate": None, "Title": stem.stem, "Subject": source},
        ".png": {"Software": None, "Title": stem.stem, "Source": source},
    }
    for suffix, metadata in kinds.items():
        with house_style(), atomic_path(stem.with_suffix(suffix)) as temporary:
            figure.savefig(temporary, format=suffix[1:], metadata=metadata)
    plt.close(figure)  # otherwise a notebook shows it twice


def save_picture(figure: plt.Figure, file: Path) -> None:
    """Writes a .png alone, of as many colours as lines and text need: a quarter of the bytes."""
    with house_style(), atomic_path(file) as temporary:
        figure.savefig(temporary, format="png")
        with Image.open(temporary) as image:
            reduced = image.convert("RGB").quantize(128)
        reduced.save(temporary, format="png", optimize=True)
    plt.close(figure)


def stability_by_layer(runs: pd.DataFrame) -> pd.DataFrame:
    """Routing stability by kind of base model, objective, method and layer: mean, least and greatest over runs."""
    by_layer = runs[runs.metric.str.fullmatch(OF_LAYERS)].copy()
    by_layer["layer"] = by_layer.metric.str.extract(r"(\d+)$").astype(int)
    named = pd.concat([group.assign(kind=kind) for kind, group in apart(by_layer)])
    groups = named.groupby(["kind", "objective", "method", "layer"], sort=False)["value"]
    return groups.agg(mean="mean", least="min", greatest="max", runs="count").reset_index()


def random_floor(runs: pd.DataFrame) -> float | None:
    """Routing stability of random sets if all models of `runs` have equal numbers of experts and k; else None."""
    sizes = [runs.loc[runs.metric == name, "value"].unique() for name in ("num_experts", "top_k")]
    return expected_overlap(*(int(size[0]) for size in sizes)) if all(len(size) == 1 for size in sizes) else None


def routing_stability_by_layer(runs: pd.DataFrame) -> plt.Figure:
    """Fig. 1a: routing stability by layer of the methods of `names.drawn`, one panel per objective and kind of base
    model. Bands span the runs. Dots mark the stability of random sets."""
    data = stability_by_layer(runs)
    kinds = apart(runs[runs.metric.str.fullmatch(OF_LAYERS)])
    floors = {kind: random_floor(runs[runs.model.isin(group.model)]) for kind, group in kinds}
    present = set(zip(data.kind, data.objective, strict=True))
    shown = [panel for panel in product(floors, names.objectives_of(data)) if panel in present]
    if not shown:
        return nothing("no run with routers was unlearned")
    with house_style():
        columns = min(2, len(shown))
        rows = -(-len(shown) // columns)
        size = PAPER_WIDTH * (0.62 if columns == 1 else 1.0), 2.4 * rows
        figure, panels = plt.subplots(rows, columns, figsize=size, sharey=True, squeeze=False)
        for unused in panels.flat[len(shown) :]:
            unused.remove()
        for axes, (kind, objective) in zip(panels.flat, shown, strict=False):
            panel = data[(data.kind == kind) & (data.objective == objective)]
            ends = {}
            for method in names.drawn(panel.method):
                line = panel[panel.method == method].sort_values("layer").set_index("layer")
                draw_line(axes, line, method, names.line_style(method))
                ends[method] = (line.index[-1], line["mean"].iloc[-1])
            first, last = panel.layer.min(), panel.layer.max()
            if floors[kind] is not None:
                axes.hlines(floors[kind], first, last, color="0.6", linewidth=0.7, linestyle=":")
                axes.text(first, floors[kind] + 0.012, "random sets", fontsize=5.5, color="0.45")
            axes.set_title(", ".join(filter(None, [kind, names.objective_label(objective)])), loc="left")
            axes.set_xlabel("MoE layer", x=0.33)
            axes.set_ylim(0, 1.03)
            label_ends(axes, ends)
            axes.set_xticks(sorted(panel.layer.unique())[:: -(-panel.layer.nunique() // 8)])
        for axes in panels[:, 0]:
            axes.set_ylabel("routing stability")
        figure.tight_layout(w_pad=1.5, h_pad=1.5)
    return figure


def draw_line(axes: plt.Axes, line: pd.DataFrame, method: str, style: str) -> None:
    """Draws means in the method's colour and marker over the index, with a band from the least to the greatest
    value."""
    axes.plot(line.index, line["mean"], style, **names.look_of(method))
    if (line.greatest > line.least).any():
        axes.fill_between(line.index, line.least, line.greatest, color=names.colour(method), alpha=0.12, linewidth=0)


def label_ends(axes: plt.Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Names each line at its right end, moved apart where they would overlap, with a thin leader."""
    if not ends:  # the panel has no line
        return
    ordered = sorted(ends.items(), key=lambda item: item[1][1])
    heights, gap = [y for _, (_, y) in ordered], 0.062
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    overshoot = max(0.0, *heights, 1.0) - 1.0
    heights = [height - overshoot for height in heights]
    for i in range(len(heights) - 2, -1, -1):
        heights[i] = min(heights[i], heights[i + 1] - gap)
    left, right = axes.get_xlim()
    span = right - left
    for (method, (x, y)), height in zip(ordered, heights, strict=True):
        look = dict(color=names.colour(method), clip_on=False)
        axes.plot([x + 0.02 * span, x + 0.09 * span], [y, height], linewidth=0.5, **look)
        axes.text(x + 0.1 * span, height, names.method_label(method), fontsize=5.6, va="center", **look)
    axes.set_xlim(left, right + 0.52 * span)
    axes.spines["bottom"].set_bounds(left, max(x for x, _ in ends.values()))


def nothing(reason: str) -> plt.Figure:
    """An empty figure with the reason, if there is nothing to show."""
    with house_style():
        figure = plt.figure(figsize=(PAPER_WIDTH * 0.62, 1.0))
        figure.text(0.5, 0.5, f"not measured: {reason}", ha="center", va="center", fontsize=6.5, color="0.4")
    return figure


Panel = tuple[plt.Axes, str, pd.DataFrame]


def panels_of(table: pd.DataFrame, height: float = 2.3) -> tuple[plt.Figure, list[Panel]]:
    """Panels on common axes: one row per kind of base model, one column per objective, `height` inches each. Returns
    each panel with its objective and the rows of its kind."""
    objectives, kinds = names.objectives_of(table), apart(table)
    size = PAPER_WIDTH, height * len(kinds)
    figure, grid = plt.subplots(len(kinds), len(objectives), figsize=size, sharex=True, sharey=True, squeeze=False)
    panels = []
    for row, (kind, group) in zip(grid, kinds, strict=True):
        of_row = len(panels)
        for axes, objective in zip(row, objectives, strict=True):
            if objective in set(group.objective):
                axes.set_title(names.objective_label(objective), loc="left")
                panels.append((axes, objective, group))
            else:
                axes.remove()
        if kind and len(panels) > of_row:
            panels[-1][0].annotate(kind, (1, 1.16), xycoords="axes fraction", ha="right", weight="bold")
    return figure, panels


ROW_OF_LEGEND = 0.135  # inches


class Marker(NamedTuple):
    """A mark of one kind of measurement; its colour is that of the method."""

    shape: str
    points: float
    filled: bool
    text: str  # in the legend

    def look(self, colour: str) -> dict:
        return dict(color=colour, markerfacecolor=colour if self.filled else "white", markersize=self.points)


def label_markers(axes: plt.Axes, markers: Iterable[Marker]) -> None:
    """Puts the markers into the legend of `axes`, in grey."""
    for marker in markers:
        axes.plot([], [], marker.shape, label=marker.text, **marker.look("0.3"))


def legend_below(figure: plt.Figure, axes: plt.Axes, columns: int = 4, note: str = "") -> None:
    """Puts a legend for the lines of `axes` below all panels, and a note below the legend. If the legend is wider than
    the figure, it gets fewer columns and the figure more height."""
    handles, shown = axes.get_legend_handles_labels()
    rows = -(-len(shown) // columns)
    foot = 0.12 * bool(note) / figure.get_figheight()
    legend = figure.legend(
        handles, shown, loc="lower center", ncol=columns, frameon=False, fontsize=6, bbox_to_anchor=(0.5, foot)
    )
    if columns > 1 and legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        more = -(-len(shown) // (columns - 1)) - rows
        figure.set_figheight(figure.get_figheight() + ROW_OF_LEGEND * more)
        return legend_below(figure, axes, columns - 1, note)
    below = 0.06 + ROW_OF_LEGEND * rows + 0.12 * bool(note)
    figure.tight_layout(rect=(0, below / figure.get_figheight(), 1, 1))
    figure.text(0.5, 0.04 / figure.get_figheight(), note, ha="center", va="bottom", fontsize=5.8, color="0.25")


SHOWN = (  # the methods of figures without room for all
    *("unconstrained", "frozen_router", "router_l2", "expert_specific_paper", "expert_specific"),
    *("ptc_matched", "anchored"),
)


def at_equal_levels(runs: Sequence[pd.DataFrame], forget: str, retain: str) -> tuple[np.ndarray, np.ndarray]:
    """Levels of `forget` that all runs pass through, and the mean over runs of `retain` at each of them: where a run
    first comes down to the level, interpolated between two checks. `runs` have a row per check."""
    checks = [run.dropna(subset=[forget, retain]).sort_values("step")[[forget, retain]].to_numpy() for run in runs]
    low, high = max(each[:, 0].min() for each in checks), min(each[0, 0] for each in checks)
    levels = np.linspace(low, max(low, high), CURVE_POINTS)
    return levels, np.mean([_first_at(levels, *each.T) for each in checks], axis=0)


def _first_at(levels: np.ndarray, forget: np.ndarray, retain: np.ndarray) -> np.ndarray:
    """`retain` where `forget` first comes down to each level, between the check before and the first one there."""
    after = (forget <= levels[:, None] + 1e-12).argmax(axis=1)
    before = np.maximum(after - 1, 0)
    fallen = forget[before] - forget[after]
    share = np.divide(forget[before] - levels, fallen, out=np.ones_like(levels), where=fallen > 0)
    return retain[before] + share * (retain[after] - retain[before])


def forget_utility_tradeoff(
    histories: pd.DataFrame, forget: str = "forget_accuracy", retain: str = "retain_accuracy"
) -> plt.Figure:
    """Retain accuracy over forget accuracy on dev questions along training (the paper's Figure 2). Each method has a
    line (the mean over runs at equal forgetting, as far as all runs forgot) and a dot (the mean of their last checks).
    Up and to the left is better. `forget` and `retain` name the two measures: accuracies, or C1 and C4."""
    wide = histories.pivot_table(index=[*KEYS, "step"], columns="metric", values="value").reset_index()
    methods = [name for name in names.drawn(wide.method) if name in SHOWN or name not in names.METHODS]
    if not names.objectives_of(wide):
        return nothing("no run was unlearned")
    with house_style():
        figure, panels = panels_of(wide)
        shown: dict[str, str] = {}
        for axes, objective, group in panels:
            for method in methods:
                runs = group[(group.objective == objective) & (group.method == method)]
                if runs.empty:
                    continue
                last = runs.sort_values("step").groupby(KEYS).tail(1)
                levels, line = at_equal_levels([run for _, run in runs.groupby(KEYS)], forget, retain)
                shown[method] = names.line_style(method)
                axes.plot(levels, line, shown[method], alpha=0.8, color=names.colour(method))
                axes.plot(*last[[forget, retain]].mean(), **names.look_of(method, 4))
            if forget == "forget_accuracy":
                axes.axvline(FOUR_WAY, color="0.6", linewidth=0.7, linestyle=":")
            axes.set_xlabel(f"{names.metric(forget).note} (dev)")
        first = panels[0][0]
        for method, style in shown.items():
            first.plot([], [], style, label=names.method_label(method), **names.look_of(method, 4))
        first.set_ylabel(f"{names.metric(retain).note} (dev)")
        legend_below(figure, first)
    return figure
