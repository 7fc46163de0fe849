"""Routing stability on held-out tokens, split into what the router did and what the representations did (Eq. 2)."""

from __future__ import annotations

from collections.abc import Sequence

from gripmoe.data.documents import Batch
from gripmoe.geometry.routing import RoutingTrace, mean_stability, route, routing_stability
from gripmoe.moe import MoEModel


def stability_metrics(before: MoEModel, after: MoEModel, batches: Sequence[Batch], prefix: str) -> dict[str, float]:
    """Flat metrics named `prefix`: the mean over layers, `_layer_<n>` for each, and two counterfactuals: `_router_only`
    (new routers on the old representations) and `_representation_only` (old routers on the new representations).

    `num_experts` and `top_k` stand beside them: they fix what random sets would give.
    """
    sums: dict[str, dict[int, float]] = {}
    tokens = 0
    for batch in batches:  # what all of them route would not fit beside large models
        trace_before, trace_after = before.trace([batch]), after.trace([batch])
        if not (count := len(next(iter(trace_before.values())))):
            continue
        parts = {
            prefix: routing_stability(trace_before, trace_after),
            f"{prefix}_router_only": routing_stability(trace_before, _rerouted(trace_before, after)),
            f"{prefix}_representation_only": routing_stability(trace_before, _rerouted(trace_after, before)),
        }
        tokens += count
        for name, by_layer in parts.items():
            kept = sums.setdefault(name, dict.fromkeys(by_layer, 0.0))
            for layer, value in by_layer.items():
                kept[layer] += count * value
    metrics = {"num_experts": after.num_experts, "top_k": after.top_k, "hidden_size": after.hidden_size}
    for name, kept in sums.items():
        by_layer = {layer: value / tokens for layer, value in kept.items()}
        metrics[name] = mean_stability(by_layer)
        metrics |= {f"{name}_layer_{layer}": value for layer, value in by_layer.items()}
    return metrics


def _rerouted(trace: RoutingTrace, model: MoEModel) -> RoutingTrace:
    thetas = model.thetas()
    return {layer: route(r.x_Nd, thetas[layer], model.rule(layer)) for layer, r in trace.items()}
