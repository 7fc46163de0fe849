"""Recording, forcing and restricting; what holds for every family is in test_families.py."""

import copy

import pytest
import torch

import gripmoe
from conftest import MOE_FAMILIES, random_batch, small_model
from gripmoe.constraints.baselines import restricted_experts
from gripmoe.moe import MoEModel
from gripmoe.moe.recording import counted_tokens


@torch.no_grad()
def logits(moe, batch):
    return moe.model(**batch.inputs).logits


def test_forcing_the_wrong_number_of_tokens_is_an_error(moe, batch):
    with moe.force_routing({layer: torch.zeros(3, moe.top_k, dtype=torch.long) for layer in moe.layers}):
        with pytest.raises(ValueError, match="routes for 3 tokens"):
            logits(moe, batch)


def test_routes_that_could_not_be_given_are_asked_for_again(moe, batch):
    """A pass that fails for want of routes fails alone: the next one is forced again."""
    free = logits(moe, batch)
    others = {layer: (top_k + 1) % moe.num_experts for layer, top_k in moe.routes(batch.input_ids).items()}
    with moe.force_routing(others):
        forced = logits(moe, batch)
    known = []

    def routes(*inputs):
        if not known:
            raise KeyError("unknown document")
        return others

    with moe.force_routing(routes):
        with pytest.raises(KeyError, match="unknown document"):
            logits(moe, batch)
        known.append(True)
        assert torch.equal(logits(moe, batch), forced) and not torch.equal(forced, free)


def test_counted_tokens_by_hand():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    assert counted_tokens(mask).tolist() == [False, True, True, False, False, False, True, True]


def together(loss_of):
    sum(map(loss_of, range(3))).backward()


def in_reverse(loss_of):
    first, second = loss_of(0), loss_of(1)
    second.backward()
    first.backward()


def without_gradients_between(loss_of):
    first = loss_of(0)
    with torch.no_grad():
        loss_of(1)
    first.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", [together, in_reverse, without_gradients_between])
def test_forced_passes_are_recomputed_under_their_own_routes(order, reentrant):
    """Gradients are those without checkpointing; the control computes each pass again under the routes of the last."""
    documents = [random_batch(seed=seed) for seed in range(3)]
    forced = [random_batch(seed=seed + 3) for seed in range(3)]  # whose sets the documents get

    def gradients(checkpointing: bool, forget: bool = False):
        model = small_model().train()
        moe = MoEModel(model)
        with moe.evaluating():
            known = [
                (given.input_ids, moe.routes(other.input_ids)) for given, other in zip(documents, forced, strict=True)
            ]
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})

        def routes(input_ids, attention_mask):
            return next(sets for ids, sets in known if torch.equal(ids, input_ids))

        def loss_of(number):
            if forget and passes:
                passes[:] = [(passes[0][0], known[number][1])]
            return (number + 1) * model(**documents[number].inputs, labels=documents[number].labels).loss

        with moe.force_routing(routes) as passes:
            order(loss_of)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plain = gradients(checkpointing=False)
    torch.testing.assert_close(gradients(checkpointing=True), plain, atol=1e-6, rtol=1e-4)
    if order is not without_gradients_between:
        assert not torch.allclose(gradients(checkpointing=True, forget=True), plain, atol=1e-3), "the control"


def test_recomputation_is_not_recorded(batch):
    model = small_model().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    moe = MoEModel(model)
    with moe.record_routing() as recorder, moe.record_hidden(0) as hidden:
        model(**batch.inputs, labels=batch.input_ids).loss.backward()
    tokens = batch.input_ids.numel()
    assert all(len(routing) == tokens for routing in recorder.take().values())
    assert len(hidden) == 1


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_bf16_model_keeps_fp32_routers(family, implementation, batch):
    model = small_model(family).to(torch.bfloat16)
    model.set_experts_implementation(implementation)
    moe = MoEModel(model)
    with moe.record_routing() as recorder:
        output = logits(moe, batch)
        trace = recorder.take()
    assert output.dtype == torch.bfloat16
    for layer in moe.layers:
        assert moe.theta(layer).dtype == trace[layer].scores_NE.dtype == torch.float32
    with moe.force_routing(moe.routes):
        assert torch.equal(output, logits(moe, batch))


def test_only_chosen_experts_change(moe, batch):
    before = copy.deepcopy(moe.model.state_dict())
    optimizer = torch.optim.AdamW(moe.model.parameters(), lr=0.1, weight_decay=0.5)
    with restricted_experts(moe, {0: [], 1: [0, 3]}, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            moe.model(**batch.inputs, labels=batch.input_ids).loss.backward()
            optimizer.step()
    for name, tensor in moe.model.state_dict().items():
        if ".experts." in name:
            changed = [e for e in range(moe.num_experts) if not torch.equal(tensor[e], before[name][e])]
            assert changed == ([0, 3] if ".1." in name else [])
    assert all(parameter.requires_grad for parameter in moe.model.parameters())


def test_a_dense_model_has_blocks_and_nothing_to_constrain(batch):
    model = small_model("qwen3")
    moe = MoEModel(model)
    assert moe.layers == [] and moe.all_layers == [0, 1] and moe.trace([batch]) == {}
    original = gripmoe.remember(small_model(), [batch])
    for refused in (
        lambda: gripmoe.constrain(model, torch.optim.SGD(model.parameters(), lr=0.1), retain=[batch]),
        lambda: gripmoe.remember(model, [batch]),
        lambda: gripmoe.realign(model, original),
        lambda: gripmoe.routed_experts(model, batch.input_ids),
    ):
        with pytest.raises(ValueError, match="is dense: it has no routers t(o|hat) "):
            refused()


def test_hooks_are_gone_after_an_error(moe):
    before = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in moe.model.modules()]
    with pytest.raises(RuntimeError, match="deliberate"):
        with moe.record_routing(), moe.force_routing(moe.routes), moe.record_hidden(0):
            raise RuntimeError("deliberate")
    after = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in moe.model.modules()]
    assert after == before
    moe.trace([random_batch()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_compute_in_fp32_under_autocast(dtype, batch):
    """And nothing else does: the experts' inputs come in bf16."""
    moe = MoEModel(small_model().to(dtype))
    plain = moe.trace([batch])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        under = moe.trace([batch])
        assert torch.is_autocast_enabled("cpu"), "the router has put it back"
    for layer in moe.layers:
        assert under[layer].scores_NE.dtype == torch.float32
        exact = under[layer].x_Nd.float() @ moe.theta(layer).T
        torch.testing.assert_close(under[layer].scores_NE, exact)
    rounded = plain[0].x_Nd.bfloat16() @ moe.theta(0).T.bfloat16()
    assert (rounded.float() - plain[0].scores_NE).abs().max() > 1e-3, "in bf16 it would show"


def test_a_trace_leaves_the_mode_alone(moe, batch):
    moe.model.train()
    with pytest.raises(KeyError):
        moe.trace([{}])
    assert moe.model.training
    assert len(moe.trace([batch, batch])[0]) == 2 * len(moe.trace([batch])[0]) and moe.model.training
