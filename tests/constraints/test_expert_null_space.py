"""Experts that move outside the span of their retain inputs: what they computed of retain tokens stays."""

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from conftest import small_model
from gripmoe.config.methods import EpsNullConfig
from gripmoe.constraints.base import FrozenRouter
from gripmoe.constraints.expert_null_space import ExpertNullSpace
from gripmoe.data.documents import collate
from gripmoe.geometry.routing import selection_mask
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import weights_digest
from gripmoe.training import steps
from moe.test_families import make
from training.test_loop import CORPORA, run

EXACT = EpsNullConfig(value=1e-10, kind="relative")
COARSE = EpsNullConfig(value=0.3, kind="relative")


def served(moe, rows=CORPORA.retain):
    """By layer and expert the inputs among the tokens of `rows` that the expert serves."""
    found = {}
    for layer, seen in moe.trace([collate(rows, 0)]).items():
        selected_NE = selection_mask(seen.top_k_Nk, moe.num_experts)
        found |= {(layer, expert): seen.x_Nd[selected_NE[:, expert]] for expert in range(moe.num_experts)}
    return {key: x_Nd for key, x_Nd in found.items() if len(x_Nd)}


def moved(moe, inputs):
    """The largest change, over experts, of what they compute of these inputs; relative to its size."""
    original = MoEModel(small_model())
    changes = []
    for (layer, expert), x_Nd in inputs.items():
        before, after = (each.expert_output(layer, expert, x_Nd) for each in (original, moe))
        changes.append(((after - before).norm() / before.norm()).item())
    return max(changes)


def trained(tmp_path, eps, name="run", **more):
    return run(tmp_path / f"{name}.pt", constraint=FrozenRouter(), expert_eps=eps, **more)


def test_what_experts_computed_of_retain_tokens_stays_and_of_forget_tokens_changes(tmp_path):
    """The control: without the projection both change."""
    retain, forget = (served(MoEModel(small_model()), rows) for rows in (CORPORA.retain, CORPORA.forget))
    moe, outcome = trained(tmp_path, EXACT)
    assert moved(moe, retain) < 1e-4 < 1e-2 < moved(moe, forget)
    free, _ = trained(tmp_path, None, "free")
    assert moved(free, retain) > 1e-2
    coarse, fewer = trained(tmp_path, COARSE, "coarse")
    assert moved(coarse, retain) > 1e-3 and fewer.held_bytes < outcome.held_bytes


def test_an_interrupted_run_resumes_in_the_same_bytes(tmp_path):
    whole, _ = trained(tmp_path, EXACT, "whole")
    checks = iter(range(4))
    with pytest.raises(StopIteration):
        trained(tmp_path, EXACT, accuracy=lambda moe: float(next(checks)))
    resumed, _ = trained(tmp_path, EXACT)
    assert weights_digest(resumed.model) == weights_digest(whole.model)


def gpt_oss():
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_local_experts=8)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, pad_token_id=0)
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, initializer_range=0.3)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj_bias.normal_()  # it begins as 0
    return model


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_what_has_other_inputs_is_frozen(family):
    """Shared experts; and biases, in a family whose matrices are transposed."""
    moe = MoEModel(gpt_oss() if family == "gpt_oss" else small_model(family))
    held = ExpertNullSpace(moe, [collate(CORPORA.retain, 0)], EXACT)
    parameters = [p for layer in moe.layers for p in moe.block(layer).parameters() if p is not moe.theta(layer)]
    held.freeze_others(parameters)
    names = {
        name.rpartition(".")[2] for name, p in moe.model.named_parameters() if p.requires_grad and ".experts." in name
    }
    assert names == {"gate_up_proj", "down_proj"}
    assert sum(p.requires_grad for p in parameters) == 2 * len(moe.layers) < len(parameters)
    inputs = served(moe)
    before = {key: moe.expert_output(*key, x) for key, x in inputs.items()}
    with torch.no_grad():
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    loose = {key: moe.expert_output(*key, x) for key, x in inputs.items()}
    held.project()
    for key, x in inputs.items():
        torch.testing.assert_close(moe.expert_output(*key, x), before[key], atol=1e-4, rtol=1e-3)
    assert any((loose[key] - before[key]).abs().max() > 1e-2 for key in inputs), "the control"


def test_experts_behind_a_projection_keep_what_they_computed():
    """Of Nemotron-H, whose experts see fewer dimensions than the router."""
    moe = make("nemotron_h", moe_latent_size=16)
    held = ExpertNullSpace(moe, [collate(CORPORA.retain, 0)], EXACT)
    inputs = served(moe)
    before = {key: moe.expert_output(*key, x) for key, x in inputs.items()}
    with torch.no_grad():
        for layer in moe.layers:
            for parameter in moe.expert_parameters(layer):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    loose = {key: moe.expert_output(*key, x) for key, x in inputs.items()}
    held.project()
    for key, x in inputs.items():
        size = before[key].norm()
        assert (moe.expert_output(*key, x) - before[key]).norm() < 1e-3 * size
        assert (loose[key] - before[key]).norm() > 0.1 * size, "the control"


def test_its_cost_is_counted_and_timing_it_changes_no_bit(tmp_path, monkeypatch):
    """The control: experts that move freely cost nothing."""
    calls, project = [], ExpertNullSpace.project
    monkeypatch.setattr(ExpertNullSpace, "project", lambda self: calls.append(self) or project(self))
    moe, outcome = trained(tmp_path, EXACT)
    assert len(calls) == outcome.steps + steps.TIMED_PAIRS, "each timed step with the constraint, and none without it"
    copies = sum(p.nbytes for layer in moe.layers for p in moe.expert_parameters(layer))
    assert copies < outcome.held_bytes < 3 * copies
    monkeypatch.setattr(steps, "TIMED_PAIRS", 0)
    untimed, _ = trained(tmp_path, EXACT, "untimed")
    assert weights_digest(moe.model) == weights_digest(untimed.model)
    assert trained(tmp_path, None, "free")[1].held_bytes == 0


def test_what_is_not_held_is_frozen_without_a_gradient():
    """Or an optimizer that has stepped would still move it by momentum."""
    model = small_model("qwen2_moe")
    moe, batch = MoEModel(model), collate(CORPORA.retain[:2], 0)
    model(**batch.inputs, labels=batch.input_ids).loss.backward()
    shared = list(moe.block(0).shared_expert.parameters())
    ExpertNullSpace(moe, [batch], EXACT).freeze_others(moe.other_parameters(0))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in shared)
    assert all(parameter.grad is not None and parameter.requires_grad for parameter in moe.expert_parameters(0))


def test_experts_in_lower_precision_are_refused():
    with pytest.raises(ConfigError, match="`experts: null_space` needs weights in fp32"):
        ExpertNullSpace(MoEModel(small_model().bfloat16()), [], EXACT)


def test_several_processes_and_dense_models_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="needs fused experts, and Qwen3ForCausalLM has none"):
        ExpertNullSpace(MoEModel(small_model("qwen3")), [], EXACT)
    monkeypatch.setattr(distributed, "processes", lambda: 2)
    with pytest.raises(ConfigError, match="start one process"):
        ExpertNullSpace(MoEModel(small_model()), [], EXACT)
