"""The charts of an audit."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd

from gripmoe.reporting.figures import house_style
from gripmoe.reporting.names import COLOURS

WIDTH = 3.4  # inches: a telephone's, on which type stays readable
MODELS = {model: COLOURS[model] for model in ("original", "retrained")} | {"unlearned": COLOURS["unconstrained"]}
COUNTS = {True: (MODELS["unlearned"], "counts"), False: (MODELS["original"], "needs a retrained model to count")}
CHARTS = {  # by caption: both axes, the end of y, and of each line how its measures begin, its style and its name
    "Forget accuracy with the original part of one layer put back": (
        *("layer", "forget accuracy", 1.02),
        {"restored_experts_layer_": ("-", "experts"), "restored_router_layer_": (":", "router")},
    ),
    "Forget accuracy over steps of finetuning": (
        *("step", "forget accuracy", 1.02),
        {
            "relearned_after_": ("-", "other forget facts"),
            "relearned_lora_after_": ("--", "the same, low-rank"),
            "relearned_routers_after_": ("-.", "the same, routers alone"),
            "relearned_from_corpus_after_": ("-.", "forget documents"),  # never beside the line above
            "relearned_from_retain_after_": (":", "retain documents"),
        },
    ),
    "Routing stability on retain documents": (
        *("layer", "routing stability", 1.02),
        {
            "routing_stability_layer_": ("-", "as it is"),
            "routing_stability_router_only_layer_": (":", "routers alone"),
            "routing_stability_representation_only_layer_": ("--", "their inputs alone"),
        },
    ),
    "What moved: norm of the change as a share of the norm": (
        *("layer", "relative change", None),
        {
            "changed_experts_layer_": ("-", "experts"),
            "changed_router_layer_": (":", "router"),
            "changed_attention_layer_": ("--", "attention"),
        },
    ),
}


def charts_of(frame: pd.DataFrame, returned: pd.DataFrame) -> dict[str, plt.Figure]:
    """Figures by caption, of what was measured."""
    figures = {"What each attack returns of what was lost; intervals hold together at 95 %": _returned(returned)}
    figures |= {caption: _lines(frame, *chart) for caption, chart in CHARTS.items()}
    return {caption: figure for caption, figure in figures.items() if figure is not None}


def _returned(returned: pd.DataFrame) -> plt.Figure | None:
    if returned.empty:
        return None
    rows = returned.sort_values("returned").reset_index(drop=True)
    with house_style():
        figure, axes = plt.subplots(figsize=(WIDTH, 0.6 + 0.27 * len(rows)))
        for counts, (colour, label) in COUNTS.items():
            part = rows[rows.counts == counts]
            if len(part):
                spread = [(part.returned - part.low).clip(lower=0), (part.high - part.returned).clip(lower=0)]
                look = dict(fmt="o", color=colour, markersize=3, linewidth=0.8, label=label)
                axes.errorbar(part.returned, part.index, xerr=spread, **look)
        axes.axvline(0, color="0.8", linewidth=0.6, zorder=0)
        for y, attack in enumerate(rows.attack):
            axes.text(0, y + 0.25, attack, transform=axes.get_yaxis_transform(), fontsize=6, va="bottom")
        axes.spines["left"].set_visible(False)
        axes.set(yticks=[], ylim=(-0.6, len(rows) - 0.1), xlabel="forget accuracy returned")
        if not rows.counts.all():
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.45 / figure.get_figheight()))
        figure.tight_layout()
    return figure


def _lines(frame: pd.DataFrame, x: str, y: str, top: float | None, kinds: Mapping[str, tuple[str, str]]):
    """Measures by the number that ends their names; a colour per model, a style per beginning of the names."""
    found = frame.measure.str.extract(rf"^(?P<kind>{'|'.join(kinds)})(?P<at>\d+)$").assign(**frame[["model", "value"]])
    found = found.dropna(subset="kind").astype({"at": int}).sort_values("at", kind="stable")
    if found.empty:
        return None
    with house_style():
        figure, axes = plt.subplots(figsize=(WIDTH, 2.3))
        for model, colour in MODELS.items():
            for kind, (style, label) in kinds.items():
                line = found[(found.model == model) & (found.kind == kind)]
                if len(line):
                    look = dict(color=colour, marker="o", markersize=2.5, label=f"{model}: {label}")
                    axes.plot(line["at"], line.value, style, **look)
        axes.set(xlabel=x, ylabel=y, xticks=sorted(set(found["at"])))
        axes.set_ylim(0, top)
        columns = found.model.nunique()
        axes.legend(frameon=False, fontsize=6, loc="upper center", bbox_to_anchor=(0.45, -0.28), ncols=columns)
        figure.tight_layout()
    return figure
