"""Tables and figures of an audit of one model."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from gripmoe.reporting.paired import paired_interval

WIDTH = 3.4  # inches: a telephone's, on which type stays readable
MODELS = {"original": "#7f7f7f", "unlearned": "#d55e00", "retrained": "#0072b2"}


def measures(found: Mapping[str, tuple[Mapping[str, float], Mapping]], facts: Mapping[str, str]) -> pd.DataFrame:
    """A row per model and metric, with a 95 % interval over facts where there are scores: `found` has each model's
    metrics and the scores that some are means of."""
    rows = []
    for model, (metrics, scores) in found.items():
        for name, value in metrics.items():
            row = {"model": model, "measure": name, "value": value, "low": None, "high": None, "n": None}
            if items := scores.get(name):
                values = pd.Series(items, dtype=float)
                _, row["low"], row["high"] = paired_interval([values.set_axis(values.index.map(facts))])
                row["n"] = len(values)
            rows.append(row)
    frame = pd.DataFrame(rows)
    return frame.astype({"value": float, "low": float, "high": float, "n": "Int64"})


def charts_of(frame: pd.DataFrame, returned: pd.DataFrame) -> dict:
    """Figures by caption, of what was measured."""
    figures = {
        "What each attack returns of what was lost; intervals hold together at 95 %": _returned(returned),
        "Forget accuracy with the original part of one layer put back": _by_layer(
            frame,
            {"restored_experts_layer_": ("-", "experts"), "restored_router_layer_": (":", "router")},
            "forget accuracy",
        ),
        "Forget accuracy over steps of finetuning": _by_layer(
            frame,
            {
                "relearned_after_": ("-", "other forget facts"),
                "relearned_from_corpus_after_": ("-.", "forget documents"),
                "relearned_from_others_after_": (":", "retain documents"),
            },
            "forget accuracy",
            "step",
        ),
        "Routing stability on retain documents": _by_layer(
            frame,
            {
                "routing_stability_layer_": ("-", "as it is"),
                "routing_stability_router_only_layer_": (":", "routers alone"),
                "routing_stability_representation_only_layer_": ("--", "their inputs alone"),
            },
            "routing stability",
        ),
        "What moved: norm of the change as a share of the norm": _by_layer(
            frame,
            {
                f"changed_{part}_layer_": (style, part)
                for part, style in (("experts", "-"), ("router", ":"), ("attention", "--"))
            },
            "relative change",
            top=None,
        ),
    }
    return {caption: figure for caption, figure in figures.items() if figure is not None}


def _returned(returned: pd.DataFrame):
    import matplotlib.pyplot as plt

    from gripmoe.reporting.figures import house_style

    if returned.empty:
        return None
    rows = returned.sort_values("returned").reset_index(drop=True)
    with house_style():
        figure, axes = plt.subplots(figsize=(WIDTH, 0.6 + 0.27 * len(rows)))
        for counts, colour, label in (
            (True, "#d55e00", "counts"),
            (False, "#7f7f7f", "needs a retrained model to count"),
        ):
            part = rows[rows.counts == counts]
            if len(part):
                low, high = part.returned - part.low, part.high - part.returned
                axes.errorbar(
                    part.returned,
                    part.index,
                    xerr=[low.clip(lower=0), high.clip(lower=0)],
                    fmt="o",
                    color=colour,
                    markersize=3,
                    linewidth=0.8,
                    label=label,
                )
        axes.axvline(0, color="0.8", linewidth=0.6, zorder=0)
        for y, attack in enumerate(rows.attack):
            axes.text(0, y + 0.25, attack, transform=axes.get_yaxis_transform(), fontsize=6, va="bottom")
        axes.spines["left"].set_visible(False)
        axes.set(yticks=[], ylim=(-0.6, len(rows) - 0.1), xlabel="forget accuracy returned")
        if not rows.counts.all():
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.45 / figure.get_figheight()))
        figure.tight_layout()
    return figure


def _by_layer(
    frame: pd.DataFrame, prefixes: Mapping[str, tuple[str, str]], y: str, x: str = "layer", top: float | None = 1.02
):
    """Lines of the measures that begin with a prefix and end in a number; a colour per model, a style per prefix."""
    import matplotlib.pyplot as plt

    from gripmoe.reporting.figures import house_style

    lines = {}
    for model, prefix in ((model, prefix) for model in MODELS for prefix in prefixes):
        part = frame[(frame.model == model) & frame.measure.str.fullmatch(rf"{prefix}\d+")]
        if len(part):
            steps = part.measure.str.removeprefix(prefix).astype(int)
            lines[model, prefix] = pd.Series(part.value.to_numpy(), index=steps).sort_index()
    if not lines:
        return None
    with house_style():
        figure, axes = plt.subplots(figsize=(WIDTH, 2.3))
        models = {model for model, _ in lines}
        for (model, prefix), line in lines.items():
            style, label = prefixes[prefix]
            axes.plot(
                line.index, line, style, color=MODELS[model], marker="o", markersize=2.5, label=f"{model}: {label}"
            )
        axes.set(xlabel=x, ylabel=y, xticks=sorted({step for line in lines.values() for step in line.index}))
        axes.set_ylim(0, top)
        axes.legend(frameon=False, fontsize=6, loc="upper center", bbox_to_anchor=(0.45, -0.28), ncols=len(models))
        figure.tight_layout()
    return figure
