"""Routing stability on held-out tokens (Eq. 2), split into the effects of the router and of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gripmoe.config.benchmarks import Task
from gripmoe.data.corpora import in_batches, load_corpus
from gripmoe.data.documents import Batch
from gripmoe.geometry.routing import RoutingTrace, mean_stability, route, stability_by_layer
from gripmoe.moe import MoEModel

Pairs = dict[str, tuple[RoutingTrace, RoutingTrace]]  # by metric: two traces of the same tokens to compare


def routing_metrics(benchmark: Task, before: MoEModel, after: MoEModel, tokenizer, data: Path) -> dict[str, float]:
    """`stability_metrics` on held-out retain documents (`routing_stability`) and as many forget documents
    (`forget_routing_stability`), and `reload_stability`."""
    held_out = load_corpus(data / "held_out_corpus.jsonl", tokenizer, **benchmark.reading)
    forget = load_corpus(data / "forget_corpus.jsonl", tokenizer, limit=len(held_out), **benchmark.reading)
    metrics = {}
    for rows, prefix in ((held_out, "routing_stability"), (forget, "forget_routing_stability")):
        metrics |= stability_metrics(before, after, in_batches(rows, tokenizer.pad_token_id), prefix)
    return metrics | reload_stability(after, in_batches(held_out, tokenizer.pad_token_id))


def stability_metrics(before: MoEModel, after: MoEModel, batches: Sequence[Batch], prefix: str) -> dict[str, float]:
    """Routing stability under the name `prefix`: the mean over layers; `_layer_<n>` for each layer; and two
    counterfactuals, `_router_only` (new routers on original inputs) and `_representation_only` (original routers on new
    inputs). Also `num_experts`, `top_k` and `hidden_size`, from which the stability of random sets follows. Raises
    ValueError if the models differ in these or in their MoE layers."""
    shapes = {
        "experts": (before.num_experts, after.num_experts),
        "experts per token": (before.top_k, after.top_k),
        "MoE layers": (before.layers, after.layers),
        "hidden size": (before.hidden_size, after.hidden_size),
    }
    if unlike := [f"{name}: {a} before, {b} after" for name, (a, b) in shapes.items() if a != b]:
        raise ValueError(f"routing stability compares a model with what became of it; these differ in {unlike[0]}")

    def pairs(batch: Batch) -> Pairs:
        trace_before, trace_after = before.trace([batch]), after.trace([batch])
        return {
            prefix: (trace_before, trace_after),
            f"{prefix}_router_only": (trace_before, _rerouted(trace_before, after)),
            f"{prefix}_representation_only": (trace_before, _rerouted(trace_after, before)),
        }

    metrics = {"num_experts": after.num_experts, "top_k": after.top_k, "hidden_size": after.hidden_size}
    for name, by_layer in _stabilities(batches, pairs).items():
        metrics[name] = mean_stability(by_layer)
        metrics |= {f"{name}_layer_{layer}": value for layer, value in by_layer.items()}
    return metrics


def reload_stability(model: MoEModel, batches: Sequence[Batch]) -> dict[str, float]:
    """`routing_stability_plain_reload`: the stability of a low-precision model when plain transformers reloads it and
    rounds its fp32 routers and their scores. Empty for a model in fp32."""
    if model.model.dtype == torch.float32:
        return {}

    def pairs(batch: Batch) -> Pairs:
        exact = model.trace([batch])
        with model.rounded_routers():
            return {"routing_stability_plain_reload": (exact, model.trace([batch]))}

    return {name: mean_stability(by_layer) for name, by_layer in _stabilities(batches, pairs).items()}


def _stabilities(batches: Sequence[Batch], pairs: Callable[[Batch], Pairs]) -> dict[str, dict[int, float]]:
    """By name and layer, the mean over all tokens. Goes batch by batch, because all traces together would take too much
    memory."""
    sums: dict[str, dict[int, float]] = {}
    tokens = 0
    for batch in batches:
        traces = pairs(batch)
        some_trace, _ = next(iter(traces.values()))
        if not (count := len(next(iter(some_trace.values())))):
            continue
        tokens += count
        for name, both in traces.items():
            by_layer = stability_by_layer(*both)
            kept = sums.setdefault(name, dict.fromkeys(by_layer, 0.0))
            for layer, value in by_layer.items():
                kept[layer] += count * value
    return {name: {layer: value / tokens for layer, value in kept.items()} for name, kept in sums.items()}


def _rerouted(trace: RoutingTrace, model: MoEModel) -> RoutingTrace:
    thetas = model.thetas()
    return {layer: route(r.x_Nd, thetas[layer], model.rule(layer)) for layer, r in trace.items()}
