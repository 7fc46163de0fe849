"""Routing in and out, in the layout of inference engines and of other trainers."""

import copy
from contextlib import contextmanager

import numpy
import pytest
import torch
from test_families import make

import gripmoe
from conftest import random_batch, small_model
from gripmoe.geometry.routing import jaccard, mean_stability, stability_by_layer
from gripmoe.moe import MoEModel


@pytest.fixture
def model():
    return small_model()


@pytest.fixture
def trained(model):
    """Other routers under the same experts."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
    return other


@torch.no_grad()
def selected(model, batch):
    """What a plain pass selects, (tokens, layers, k)."""
    routes = MoEModel(model).routes(**batch.inputs)
    return torch.stack(list(routes.values()), dim=1)


def test_recorded_experts_are_those_of_the_routers_and_padding_has_none(model, batch):
    hooks = [len(module._forward_hooks) for module in model.modules()]
    experts = gripmoe.routed_experts(model, **batch.inputs)
    assert experts.dtype == torch.int16 and experts.shape == (*batch.input_ids.shape, 2, 2)
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    real = batch.attention_mask.flatten().bool()
    assert torch.equal(experts.flatten(0, 1)[real].long(), selected(model, batch)[real])
    assert (experts.flatten(0, 1)[~real] == -1).all() and not real.all()


def test_routing_stability_is_that_of_the_workflow(model, trained, batch):
    """Of a padded batch. The control: with padding and first tokens it would be another."""
    before, after = (gripmoe.routed_experts(each, **batch.inputs) for each in (model, trained))
    traces = (MoEModel(each).trace([batch]) for each in (model, trained))
    stability = gripmoe.routing_stability(before, after)
    assert stability == pytest.approx(mean_stability(stability_by_layer(*traces)), abs=1e-6)
    assert stability < 0.9 and gripmoe.routing_stability(before, before) == 1.0
    assert gripmoe.routing_stability(before.numpy(), after.tolist()) == stability, "as engines return them"
    of_all = jaccard(before.flatten(0, 2), after.flatten(0, 2)).mean().item()
    assert of_all != pytest.approx(stability, abs=1e-3)


def test_routing_stability_takes_any_integer_type(model, trained, batch):
    before, after = (gripmoe.routed_experts(each, **batch.inputs).clamp_min(0) for each in (model, trained))
    wanted = gripmoe.routing_stability(before[:, :5], after[:, :5])
    given = (each[:, :5].numpy().astype(numpy.uint16) for each in (before, after))
    assert gripmoe.routing_stability(*given) == wanted


def test_what_has_no_routing_stability(model, batch):
    experts = gripmoe.routed_experts(model, **batch.inputs)
    with pytest.raises(ValueError, match="give two tensors .rows, positions, layers, k. of the same documents"):
        gripmoe.routing_stability(experts, experts[:1])
    with pytest.raises(ValueError, match="give two tensors"):
        gripmoe.routing_stability(experts[0], experts[0])
    with pytest.raises(ValueError, match="no token counts"):
        gripmoe.routing_stability(experts[:, :1], experts[:, :1])
    with pytest.raises(ValueError, match="give whole numbers"):
        gripmoe.routing_stability(experts.float(), experts)
    dense = torch.zeros_like(experts[:, :, :1])  # what an engine may write for a layer without a router
    for of_dense, said in (
        (dense, "in layer 0 of the tensor a token's experts repeat"),
        (dense - 1, r"layers \[0\] hold"),
    ):
        whole = torch.cat([of_dense, experts], dim=2)
        with pytest.raises(ValueError, match=said):
            gripmoe.routing_stability(whole, whole)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint8])
def test_another_model_replays_them_with_its_own_weights(model, trained, batch, dtype):
    experts = gripmoe.routed_experts(model, batch.input_ids)
    with gripmoe.replay_experts(trained, experts.to(dtype)):
        assert torch.equal(selected(trained, batch), experts.flatten(0, 1).long())
        replayed = trained(**batch.inputs).logits
    assert not torch.equal(selected(trained, batch), experts.flatten(0, 1).long()), "the control: without replay"
    moe = MoEModel(trained)
    by_hand = {layer: experts.flatten(0, 1)[:, layer].long() for layer in moe.layers}
    with moe.force_routing(by_hand):
        assert torch.equal(trained(**batch.inputs).logits, replayed)


def test_a_token_without_a_route_keeps_its_own_experts(model, trained, batch):
    """As the last sampled token has in vLLM, which was never fed: such a tensor is filled up with -1."""
    of_model, own = gripmoe.routed_experts(model, batch.input_ids)[:, :-1], selected(trained, batch)
    filled = torch.nn.functional.pad(of_model, (0, 0, 0, 0, 0, 1), value=-1)
    with gripmoe.replay_experts(trained, filled):
        now = selected(trained, batch).unflatten(0, batch.input_ids.shape)
    assert torch.equal(now[:, :-1], of_model.long())
    assert torch.equal(now[:, -1, 0], own.unflatten(0, batch.input_ids.shape)[:, -1, 0])
    with torch.no_grad(), gripmoe.replay_experts(trained, torch.full_like(filled, -1)):
        unforced = trained(**batch.inputs).logits
    assert torch.equal(unforced, trained(**batch.inputs).logits)


def test_a_function_gives_each_pass_its_own_tensor_and_gradients_follow(model, trained):
    batches = [random_batch(seed=seed) for seed in range(2)]
    known = [(batch.input_ids, gripmoe.routed_experts(model, **batch.inputs)) for batch in batches]

    def of(input_ids, attention_mask):
        return next((experts for ids, experts in known if torch.equal(ids, input_ids)), None)

    def gradient(checkpointing):
        replayed = copy.deepcopy(trained).train()
        if checkpointing:
            replayed.activation_checkpointing_enable({"use_reentrant": False})
        with gripmoe.replay_experts(replayed, of) as passes:
            sum(replayed(**batch.inputs, labels=batch.labels).loss for batch in batches).backward()
            assert len(passes) == len(batches), "kept until a loop clears them"
        return replayed.model.layers[0].mlp.gate.weight.grad

    torch.testing.assert_close(gradient(True), gradient(False))
    other = random_batch(seed=5)
    with torch.no_grad(), gripmoe.replay_experts(trained, of):
        free = trained(**other.inputs).logits
    assert torch.equal(free, trained(**other.inputs).logits), "a pass that is not replayed"


def test_layers_are_moe_layers_or_all_decoder_layers():
    """GLM's first layer is dense."""
    model, batch = make("glm4_moe").model, random_batch()
    experts = gripmoe.routed_experts(model, batch.input_ids)
    assert experts.shape[2] == 1
    every = torch.cat([torch.full_like(experts, -1), (experts + 1) % 8], dim=2)
    with gripmoe.replay_experts(model, every):
        assert torch.equal(selected(model, batch), every.flatten(0, 1)[:, 1:].long())


@pytest.mark.parametrize(
    "given, message",
    [
        (lambda e: e[:, :, :1], "1 layers; the model has 2 MoE layers of 2"),
        (lambda e: e[..., :1], "1 experts a token; the model selects 2"),
        (lambda e: e.float(), "not whole numbers"),
        (lambda e: e[0, 0], "not whole numbers of shape"),
        (lambda e: e.clamp(max=0), "a token's experts repeat"),
        (lambda e: e + 7, "not among the 8"),
        (lambda e: e[:, :-1], "the pass has 48"),
        (lambda e: None, "`routed_experts` is a NoneType: give a tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_is_a_value_error(model, batch, given, message):
    experts = gripmoe.routed_experts(model, batch.input_ids)
    with pytest.raises(ValueError, match=message), gripmoe.replay_experts(model, given(experts)):
        model(**batch.inputs)
    with gripmoe.replay_experts(model, experts):
        model(**batch.inputs)


def test_inputs_of_another_shape_have_no_routes(model, batch):
    ids = batch.input_ids
    for given in ((ids[0],), (ids.tolist(),), (ids, batch.attention_mask[:, 1:])):
        with pytest.raises(ValueError, match=r"must be a tensor, \(rows, positions\)"):
            gripmoe.routed_experts(model, *given)


def test_tokens_outside_the_vocabulary_have_no_routes(model, batch):
    for token in (-1, model.get_input_embeddings().num_embeddings):
        with pytest.raises(ValueError, match="`input_ids`: tokens are not in the model's vocabulary of"):
            gripmoe.routed_experts(model, torch.full_like(batch.input_ids, token))


def test_a_dense_model_has_no_routes(batch):
    with pytest.raises(ValueError, match="is dense"):
        gripmoe.routed_experts(small_model("qwen3"), batch.input_ids)


def test_a_handle_is_not_opened_within_a_replay(batch):
    """Its bases would be of the replayed experts. A handle that is open keeps routers in fp32."""
    model = small_model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    with gripmoe.replay_experts(model, lambda *_: None):
        with pytest.raises(ValueError, match="replaces what routers select: leave its block first"):
            gripmoe.constrain(model, optimizer, [batch])
    assert {layer.mlp.gate.weight.dtype for layer in model.model.layers} == {torch.bfloat16}
    with gripmoe.constrain(model, optimizer, [batch]), gripmoe.replay_experts(model, lambda *_: None):
        pass
    assert {layer.mlp.gate.weight.dtype for layer in model.model.layers} == {torch.float32}


def test_an_optimizer_steps_a_model_in_bf16_after_a_replay(batch):
    """Routers and their gradients return to bf16 together."""
    model = small_model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = model.model.layers[0].mlp.gate.weight.detach().clone()
    with gripmoe.replay_experts(model, gripmoe.routed_experts(model, batch.input_ids, batch.attention_mask)):
        model(**batch.inputs, labels=batch.input_ids).loss.backward()
        assert model.model.layers[0].mlp.gate.weight.grad.dtype == torch.float32
    optimizer.step()
    now = model.model.layers[0].mlp.gate.weight
    assert now.dtype == now.grad.dtype == torch.bfloat16 and not torch.equal(now, before)


def test_the_replay_of_a_constraint_forgets_its_passes_at_each_step(model, batch, monkeypatch):
    """And gradient checkpointing over several passes of a step is recomputed under their own sets."""
    lists, forced = [], MoEModel.force_routing

    def watched(self, routes):
        @contextmanager
        def entered():
            with forced(self, routes) as passes:
                lists.append(passes)
                yield passes

        return entered()

    monkeypatch.setattr(MoEModel, "force_routing", watched)
    optimizer, other = torch.optim.SGD(model.parameters(), lr=1e-3), random_batch(seed=1)
    model.activation_checkpointing_enable({"use_reentrant": False})
    with gripmoe.constrain(model, optimizer, [batch, other], replay=True):
        model.train()
        for _ in range(2):
            (
                model(**batch.inputs, labels=batch.labels).loss - model(**other.inputs, labels=other.labels).loss
            ).backward()
            assert len(lists[0]) == 2
            optimizer.step()
            assert not lists[0]
