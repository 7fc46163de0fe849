"""The README's picture: what methods retain, how much of the routing they keep, and what they forget."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd

from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.reporting import names
from gripmoe.reporting.figures import PAPER_WIDTH, Marker, house_style, label_markers, legend_below
from gripmoe.reporting.scores import FOUR_WAY
from gripmoe.reporting.uncertainty import interval, units_of_table

MARKERS = {  # by metric; later ones are drawn on top
    "forced_forget_accuracy": Marker("o", 5.5, False, "original expert sets forced"),
    "relearned_after_20": Marker("x", 4, True, "20 steps of relearning"),
    "forget_accuracy": Marker("o", 2.8, True, "no attack"),
}
DOT = Marker("o", 3, True, "")
PANELS = {
    "retain accuracy": ["retain_accuracy"],
    "routing stability": ["routing_stability"],
    "forget accuracy": MARKERS,
}
WIDTHS = 2, 2, 3


def overview(runs: pd.DataFrame, methods: Sequence[str]) -> plt.Figure:
    """Means over base models and objectives, with 95 % intervals over base models: a panel per measure, a row per
    method. Raises ValueError for a method that was not measured under all objectives, which would not compare."""
    asked = [metric for metrics in PANELS.values() for metric in metrics]
    found = runs[runs.metric.isin(asked) & runs.method.isin(methods)]
    objectives = set(names.objectives_of(runs))
    for method in methods:
        under = set(found.objective[found.method == method])
        if not under:
            raise ValueError(f"{method} was not measured")
        if under not in ({NO_OBJECTIVE}, objectives):
            raise ValueError(f"{method} was measured under {', '.join(sorted(under))} alone")
    with house_style():
        figure, panels = plt.subplots(
            1, len(PANELS), figsize=(PAPER_WIDTH, 0.9 + 0.17 * len(methods)), sharey=True, width_ratios=WIDTHS
        )
        for axes, (title, metrics) in zip(panels, PANELS.items(), strict=True):
            for y, method in enumerate(reversed(methods)):
                for metric in metrics:
                    mean, half = interval(units_of_table(found[(found.method == method) & (found.metric == metric)]))
                    marker = MARKERS.get(metric, DOT)
                    look = marker.look(names.colour(method))
                    axes.errorbar([mean], [y], xerr=half, fmt=marker.shape, elinewidth=0.8, clip_on=False, **look)
            axes.set(xlabel=title, xlim=(0, 1.02), ylim=(-0.7, len(methods) - 0.3))
        panels[0].set_yticks(range(len(methods)), [names.method_label(method) for method in reversed(methods)])
        panels[-1].axvline(FOUR_WAY, color="0.6", linewidth=0.7, linestyle=":")
        label_markers(panels[-1], MARKERS.values())
        legend_below(figure, panels[-1], columns=3, note="forget accuracy: the dotted line is a guess")
    return figure
