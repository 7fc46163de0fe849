"""Routing stability of a run: batch by batch, and what moved it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import MOE_FAMILIES, random_batch, small_model
from gripmoe.data.documents import Row, collate
from gripmoe.evaluation.routing_stability import reload_stability, stability_metrics
from gripmoe.geometry.routing import mean_stability, stability_by_layer
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model, save_model


def test_batch_by_batch_is_as_all_at_once():
    before, after = MoEModel(small_model()), MoEModel(small_model())
    with torch.no_grad():
        after.expert_parameters(0)[0].mul_(1.5)
        after.theta(1).add_(0.5 * torch.randn(after.theta(1).shape, generator=torch.Generator().manual_seed(0)))
    first_tokens = collate([Row("short", [5], [5])], 0)  # nothing of it counts
    batches = [random_batch(rows=2, length=6), random_batch(rows=5, length=16, seed=1), first_tokens]
    metrics = stability_metrics(before, after, batches, "rs")
    whole = stability_by_layer(before.trace(batches), after.trace(batches))
    assert abs(metrics["rs"] - mean_stability(whole)) < 1e-6
    assert abs(metrics["rs_layer_1"] - whole[1]) < 1e-6 and whole[1] < 0.9
    assert metrics["rs_router_only_layer_0"] == 1.0 > metrics["rs_router_only_layer_1"], "only one router has moved"
    assert metrics["rs_representation_only_layer_0"] == 1.0 > metrics["rs_representation_only_layer_1"]
    assert (metrics["num_experts"], metrics["top_k"]) == (before.num_experts, before.top_k)


OTHER_SHAPES = [
    (dict(num_experts=4), "experts: 8 before, 4 after"),
    (dict(top_k=3), "experts per token: 2 before, 3 after"),
    (dict(num_layers=1), r"MoE layers: \[0, 1\] before, \[0\] after"),
    (dict(hidden_size=64), "hidden size: 32 before, 64 after"),
]


@pytest.mark.parametrize("other, message", OTHER_SHAPES)
def test_routers_that_cannot_be_compared_are_named(other, message, batch):
    before, after = MoEModel(small_model()), MoEModel(small_model(**other))
    stability_metrics(before, before, [batch], "rs")
    with pytest.raises(ValueError, match=message):
        stability_metrics(before, after, [batch], "rs")


def sets_of(model, batch):
    """What the routers of a transformers model choose, as it is: (layers, tokens, k)."""
    chosen = []
    handles = [layer.mlp.gate.register_forward_hook(lambda *a: chosen.append(a[2][2])) for layer in model.model.layers]
    with torch.no_grad():
        model(**batch.inputs)
    for handle in handles:
        handle.remove()
    return torch.stack(chosen)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_model_in_bf16_keeps_its_sets_on_disk_but_not_all_in_plain_transformers(family, tmp_path, tokenizer):
    """With its routers' fp32 file all; without, .997 (Qwen3) and .998 (Qwen2). Within `rounded_routers` it is the model
    that plain transformers loads."""
    small_model(family).to(torch.bfloat16).save_pretrained(tmp_path / "published")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published").eval()
    moe = MoEModel(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in moe.layers:  # what training adds to a router is not in bf16
            moe.theta(layer).add_(1e-3 * torch.randn(moe.theta(layer).shape, generator=generator))
    batches = [random_batch(rows=16, length=40, seed=seed) for seed in range(8)]
    before = moe.trace(batches)
    save_model(model, tokenizer, tmp_path / "model")

    loaded = MoEModel(load_model(tmp_path / "model")[0])
    assert mean_stability(stability_by_layer(before, loaded.trace(batches))) == 1.0
    metrics = reload_stability(loaded, batches)
    assert 0.99 < metrics["routing_stability_plain_reload"] < 0.9995
    after = loaded.trace(batches)
    assert all(torch.equal(before[layer].scores_NE, after[layer].scores_NE) for layer in before), "it is put back"

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with loaded.rounded_routers():
        assert torch.equal(sets_of(loaded.model, batches[0]), sets_of(plain, batches[0]))
    assert not torch.equal(sets_of(loaded.model, batches[0]), sets_of(plain, batches[0])), "the control"


def test_a_model_in_fp32_loses_nothing_and_has_no_such_metric(tmp_path, tokenizer, batch):
    model = small_model(vocabulary_size=len(tokenizer))
    save_model(model, tokenizer, tmp_path / "model")
    assert reload_stability(MoEModel(load_model(tmp_path / "model")[0]), [batch]) == {}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(sets_of(model, batch), sets_of(plain, batch))
