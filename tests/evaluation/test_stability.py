"""Routing stability of a cell: batch by batch, and what moved it."""

import torch

from conftest import random_batch, small_model
from gripmoe.data.documents import Row, collate
from gripmoe.evaluation.routing import stability_metrics
from gripmoe.geometry.routing import mean_stability, routing_stability
from gripmoe.moe import MoEModel


def test_batch_by_batch_is_as_all_at_once():
    before, after = MoEModel(small_model()), MoEModel(small_model())
    with torch.no_grad():
        after.expert_parameters(0)[0].mul_(1.5)
        after.theta(1).add_(0.5 * torch.randn(after.theta(1).shape, generator=torch.Generator().manual_seed(0)))
    first_tokens = collate([Row("short", [5], [5])], 0)  # nothing of it counts
    batches = [random_batch(rows=2, length=6), random_batch(rows=5, length=16, seed=1), first_tokens]
    metrics = stability_metrics(before, after, batches, "rs")
    whole = routing_stability(before.trace(batches), after.trace(batches))
    assert abs(metrics["rs"] - mean_stability(whole)) < 1e-6
    assert abs(metrics["rs_layer_1"] - whole[1]) < 1e-6 and whole[1] < 0.9
    assert metrics["rs_router_only_layer_0"] == 1.0 > metrics["rs_router_only_layer_1"], "only one router has moved"
    assert metrics["rs_representation_only_layer_0"] == 1.0 > metrics["rs_representation_only_layer_1"]
    assert (metrics["num_experts"], metrics["top_k"]) == (before.num_experts, before.top_k)
