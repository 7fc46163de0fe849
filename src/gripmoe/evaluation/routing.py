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
    trace_before, trace_after = before.trace(batches), after.trace(batches)
    total = routing_stability(trace_before, trace_after)
    router_only = routing_stability(trace_before, _rerouted(trace_before, after))
    representation_only = routing_stability(trace_before, _rerouted(trace_after, before))
    metrics = {
        "num_experts": after.num_experts,
        "top_k": after.top_k,
        "hidden_size": after.hidden_size,
        prefix: mean_stability(total),
        f"{prefix}_router_only": mean_stability(router_only),
        f"{prefix}_representation_only": mean_stability(representation_only),
    }
    for layer in total:
        metrics[f"{prefix}_layer_{layer}"] = total[layer]
        metrics[f"{prefix}_router_only_layer_{layer}"] = router_only[layer]
        metrics[f"{prefix}_representation_only_layer_{layer}"] = representation_only[layer]
    return metrics


def _rerouted(trace: RoutingTrace, model: MoEModel) -> RoutingTrace:
    return {layer: route(r.x_Nd, model.theta(layer).detach(), model.rule(layer)) for layer, r in trace.items()}
