"""A router that follows its inputs within the retain forward: layer by layer, without writing weights that a backward
pass still needs, and once more after the last step."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gripmoe
from conftest import random_batch, small_model
from gripmoe.geometry.tracking import RouterTracker
from gripmoe.moe import MoEModel

RETAIN = [random_batch(seed=200), random_batch(seed=201)]
FORGET = random_batch(seed=202)


def drifted(checkpointing=False):
    """A constrained model of which the first layer's experts have moved, and its handle."""
    model = small_model().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gripmoe.constrain(model, optimizer, RETAIN, method="anchored_tracked")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(3)
    return model, optimizer, handle


def loss_of(model, batch):
    return model(**batch.inputs, labels=batch.input_ids).loss


def weights_of(model):
    return [layer.mlp.gate.weight for layer in model.model.layers]


def test_a_retain_pass_goes_on_with_the_router_that_fits_its_inputs():
    """Of the same pass, not of the one before; all tokens of it, and no other pass."""
    original = MoEModel(small_model())
    trace = original.trace(RETAIN[:1])
    model, optimizer, handle = drifted()
    before = [weight.detach().clone() for weight in weights_of(model)]
    with handle.model.record_routing() as recorder:
        with handle.retain():
            loss = loss_of(model, RETAIN[0])
        marked = recorder.take()
        model(**RETAIN[0].inputs)
        unmarked = recorder.take()
    keep = ((RETAIN[0].attention_mask == 1) & (RETAIN[0].attention_mask.cumsum(1) > 1)).flatten()
    for layer, theta_0 in original.thetas().items():
        seen = marked[layer]
        fitted = RouterTracker(theta_0).update(seen.x_Nd[keep].detach(), trace[layer].x_Nd @ theta_0.T).float()
        torch.testing.assert_close(seen.scores_NE, seen.x_Nd @ fitted.T, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(unmarked[layer].scores_NE, unmarked[layer].x_Nd @ theta_0.T, rtol=1e-4, atol=1e-4)
        assert torch.equal(weights_of(model)[layer], before[layer]), "not before the step"
        error = (seen.scores_NE[keep] - trace[layer].scores_NE).norm()
        frozen = (seen.x_Nd[keep] @ theta_0.T - trace[layer].scores_NE).norm()
        assert layer == 0 or error < 0.5 * frozen, "the control: a router that stays"
    (loss + handle.penalty()).backward()
    optimizer.step()
    torch.testing.assert_close(weights_of(model)[1].detach(), fitted)


def gradients_of_halves(order, recomputed=None):
    """Of one batch in two passes, its halves marked in turn: two routers for the same inputs. The backward passes come
    in `order`, after both passes. Every layer is computed again, or the whole model at once."""
    model, _, handle = drifted(checkpointing=recomputed == "layers")
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(10)
    losses, routers = [], []
    for rows in (torch.arange(4) < 2, torch.arange(4) >= 2):
        with handle.retain(rows=rows):
            if recomputed == "model":
                losses.append(checkpoint(loss_of, model, RETAIN[0], use_reentrant=False))
            else:
                losses.append(loss_of(model, RETAIN[0]))
        handle.penalty()
        routers.append(handle.state_dict()["trackers"][0][2])
    assert not torch.allclose(*routers, atol=0.1), "the control: which pass it is matters"
    for number in order:
        losses[number].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("recomputed", ["layers", "model"])
def test_passes_with_equal_inputs_are_told_apart(order, recomputed):
    torch.testing.assert_close(gradients_of_halves(order, recomputed), gradients_of_halves(order))


def gradients(checkpointing, *, forgets=False):
    """Of two forget and retain passes, the backward passes only after the last of them."""
    model, _, handle = drifted(checkpointing)
    losses = []
    for batch in RETAIN:
        with handle.forget():
            losses.append(-loss_of(model, FORGET))
        with handle.retain():
            losses.append(loss_of(model, batch))
        losses.append(handle.penalty())
    if forgets:
        handle._refit.clear()
    sum(losses).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_backward_passes_come_whenever_they_like_also_where_activations_are_computed_again():
    """Every pass is computed again with the router it was made with. The control, with that of the model, either ends
    in other gradients or is caught by torch, which counts what each expert was given."""
    plain = gradients(checkpointing=False)
    torch.testing.assert_close(gradients(checkpointing=True), plain)
    with pytest.raises((AssertionError, torch.utils.checkpoint.CheckpointError)):
        torch.testing.assert_close(gradients(checkpointing=True, forgets=True), plain)


def test_refitted_once_more_it_has_seen_what_the_last_step_did():
    """Scores of retain tokens are then nearer to the original ones than with the router of the step."""
    trace = MoEModel(small_model()).trace(RETAIN[:1])
    model, optimizer, handle = drifted()
    with handle.retain():
        loss = loss_of(model, RETAIN[0])
    (loss + handle.penalty()).backward()
    with pytest.raises(RuntimeError, match="refitted between steps"):
        handle.refit(RETAIN[0])
    optimizer.step()
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)

    def error():
        return (handle.model.trace(RETAIN[:1])[1].scores_NE - trace[1].scores_NE).norm().item()

    late = error()
    handle.refit(RETAIN[0].inputs)
    assert error() < 0.9 * late
    assert model.training and not handle._refit._passes
    followed = [weight.detach().clone() for weight in weights_of(model)]
    handle.close()
    handle.refit(RETAIN[1])
    assert all(map(torch.equal, weights_of(model), followed)), "a closed handle does nothing"


def test_after_a_step_that_is_skipped_routers_may_be_refitted():
    """The control: before `skip` they may not."""
    model, _, handle = drifted()
    before = [weight.detach().clone() for weight in weights_of(model)]
    with handle.retain():
        loss_of(model, RETAIN[0])
    with pytest.raises(RuntimeError, match="refitted between steps"):
        handle.refit(RETAIN[0])
    handle.skip()
    handle.refit(RETAIN[0])
    assert not torch.equal(weights_of(model)[1], before[1])


def test_a_marked_pass_without_gradients_is_an_evaluation():
    """As the evaluations within Trainer are: how often one evaluates changes nothing. The control is a pass with."""
    model, _, handle = drifted()
    before = copy.deepcopy(handle.state_dict()["trackers"])
    for gradients, moved in ((False, False), (True, True)):
        with torch.set_grad_enabled(gradients), handle.retain():
            loss_of(model, RETAIN[0])
        handle.penalty()
        after = handle.state_dict()["trackers"]
        assert torch.equal(after[1][2], before[1][2]) != moved
        if not moved:
            handle.refit(RETAIN[0])
            before = copy.deepcopy(handle.state_dict()["trackers"])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_is_interrupted_leaves_the_routers_their_parameters(error):
    model, optimizer, handle = drifted()
    parameters = weights_of(model)

    def fail(*_):
        raise error

    hook = model.model.layers[1].mlp.gate.register_forward_pre_hook(fail)
    with pytest.raises(error), handle.retain():
        loss_of(model, RETAIN[0])
    hook.remove()
    with handle.retain():
        loss = loss_of(model, RETAIN[0])
    (loss + handle.penalty()).backward()
    optimizer.step()
    handle.close()
    assert all(one is other for one, other in zip(weights_of(model), parameters, strict=True))


@pytest.mark.parametrize("method", ["anchored", "expert_specific"])
def test_other_routers_are_not_refitted(method):
    model = small_model()
    handle = gripmoe.constrain(model, torch.optim.SGD(model.parameters()), RETAIN, method=method)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(3)
    before = [weight.detach().clone() for weight in weights_of(model)]
    handle.refit(RETAIN[0])
    assert all(map(torch.equal, weights_of(model), before))


def test_no_tokens_leave_a_router_as_it_was():
    tracker = RouterTracker(torch.randn(3, 4))
    nothing = torch.zeros(0, 4), torch.zeros(0, 3)
    assert torch.equal(tracker.update(*nothing), tracker.theta_0_Ed)
    followed = tracker.update(torch.randn(9, 4), torch.randn(9, 3))
    assert torch.equal(tracker.update(*nothing), followed)
