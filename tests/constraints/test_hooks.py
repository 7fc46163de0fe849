"""The handle in other people's loops: accumulation, mixed batches, recomputation, accelerate, resuming."""

import copy
import warnings
from contextlib import nullcontext
from dataclasses import replace

import accelerate
import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gripmoe
from conftest import METHODS, random_batch, small_model
from gripmoe.config.methods import EpsNullConfig, Method, method_table
from gripmoe.constraints.base import RouterConstraint
from gripmoe.constraints.hooks import ConstraintHandle
from gripmoe.constraints.null_space import NullSpacePaper
from gripmoe.data.documents import collate_inputs
from gripmoe.geometry.routing import mean_stability, route, stability_by_layer
from gripmoe.moe import MoEModel
from gripmoe.moe.placement import place
from pretended_devices import FIRST, HOST, PretendedDevices

pytestmark = pytest.mark.filterwarnings("ignore:AdamW decays router weights")
RETAIN = [random_batch(seed=100), random_batch(seed=101)]
# Draws rows at random wherever a margin is exceeded, which with a wide one is in every step.
PAPER = METHODS["expert_specific_paper"].model_copy(update={"safety_margin": 1.0})


CACHED = method_table()["expert_specific_paper_cached"]
EVERY_2 = METHODS["expert_specific"].model_copy(update={"every": 2})


def adamw(model, lr=0.05):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def loss_of(model, batch):
    return model(**batch.inputs, labels=batch.input_ids).loss


def router_only_stability(trace, model):
    moe = MoEModel(model)
    moved = {layer: route(r.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, r in trace.items()}
    return mean_stability(stability_by_layer(trace, moved))


class Spy(NullSpacePaper):
    """Keeps how many tokens each step was constrained with."""

    def __init__(self):
        super().__init__(PAPER)
        self.tokens = []

    def constrain(self, layer, before_Ed, after_Ed, seen):
        self.tokens.append(len(seen))
        return super().constrain(layer, before_Ed, after_Ed, seen)


def spied(model, optimizer):
    moe, spy = MoEModel(model), Spy()
    spy.start(moe, [])
    return ConstraintHandle(moe, optimizer, spy), spy


def counted(batch):
    return int(batch.attention_mask.sum()) - len(batch.row_ids)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("method", ["anchored", "routing_scores", "expert_specific_paper", "seuf"])
def test_a_mask_may_lie_on_another_device_than_the_tokens(method, copied):
    """As in a loop that brings the tokens alone to the GPU; transformers moves the mask by itself."""
    penalties = []
    for where in (FIRST, HOST):
        with PretendedDevices():
            model, original = small_model(), small_model() if copied else None
            for each in (model, original) if copied else (model,):
                place(each, [FIRST])
            optimizer, batch = adamw(model), RETAIN[0].to(FIRST)
            given = dict(method=method, forget=[batch], original=original)
            with gripmoe.constrain(model, optimizer, [batch], **given) as handle:
                with torch.no_grad():
                    handle.model.expert_parameters(0)[0].mul_(2.0)
                kind = next(iter(handle.watches))
                with getattr(handle, kind)(rows=torch.tensor([True, False, True, True])):
                    model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.to(where))
                penalties.append(float(handle.penalty()))
                handle.skip()
    assert penalties[0] == penalties[1] and bool(penalties[0]) == (method != "expert_specific_paper")


def test_accumulated_retain_passes_count_together():
    model = small_model()
    optimizer = adamw(model)
    handle, spy = spied(model, optimizer)
    for batch in RETAIN:
        with handle.retain():
            loss_of(model, batch).backward()
    optimizer.step()
    assert spy.tokens == [sum(map(counted, RETAIN))] * 2


def test_retain_rows_of_a_combined_batch():
    model = small_model()
    optimizer = adamw(model)
    handle, spy = spied(model, optimizer)
    both = collate_inputs([random_batch(rows=3, length=9), RETAIN[0]])
    with handle.retain(rows=torch.arange(len(both.row_ids)) >= 3):
        loss_of(model, both).backward()
    optimizer.step()
    assert spy.tokens == [counted(RETAIN[0])] * 2


def test_recomputation_is_not_a_second_pass():
    model = small_model()
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = adamw(model)
    handle, spy = spied(model, optimizer)
    with handle.retain():
        loss_of(model, RETAIN[0]).backward()
    optimizer.step()
    assert spy.tokens == [counted(RETAIN[0])] * 2


def test_one_mark_is_one_pass():
    model = small_model()
    handle, _ = spied(model, adamw(model))
    with pytest.raises(RuntimeError, match="marks one forward pass, not 2"):
        with handle.retain():
            for batch in RETAIN:
                model(**batch.inputs)


def test_a_mark_whose_block_raised_does_not_count():
    model = small_model()
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, method="expert_specific_paper") as handle:
        with pytest.raises(OSError), handle.retain():
            raise OSError("the next batch is not there")
        loss_of(model, RETAIN[0]).backward()
        with pytest.raises(RuntimeError, match="run it within"):
            optimizer.step()


def accelerated(constrained):
    """Two micro-batches a step, by accelerate; only real steps may reach the handle."""
    model = small_model()
    optimizer = adamw(model)
    trace = MoEModel(model).trace(RETAIN)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    handle = gripmoe.constrain(model, optimizer, RETAIN) if constrained else None
    for step in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, random_batch(seed=step)))
            optimizer.step()
            optimizer.zero_grad()
    if handle:
        handle.close()
    return router_only_stability(trace, accelerator.unwrap_model(model))


def test_accelerate_with_gradient_accumulation():
    assert accelerated(True) == 1.0
    assert accelerated(False) < 0.95, "the control"


def accumulated(method, by_accelerate, marked=2):
    """Two steps of two micro-batches, of which the first `marked` are retain passes; the weights at the end."""
    model = small_model()
    optimizer = adamw(model, lr=1e-2)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    if by_accelerate:
        model, optimizer = accelerator.prepare(model, optimizer)
    handle = gripmoe.constrain(model, optimizer, RETAIN, method=method)
    for number, batch in enumerate(2 * RETAIN):
        with accelerator.accumulate(model) if by_accelerate else nullcontext():
            with handle.retain() if number % 2 < marked else nullcontext():
                loss = loss_of(model, batch)
            loss = loss + handle.penalty()
            if by_accelerate:
                accelerator.backward(loss)
            else:
                (loss / 2).backward()
            if by_accelerate or number % 2:
                optimizer.step()
                optimizer.zero_grad()
    handle.close()
    return [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("method", ["expert_specific_minibatch", CACHED, "anchored"])
def test_what_is_marked_under_accelerate_counts_as_in_a_plain_loop(method):
    """All micro-batches of a step; the control is a loop that leaves the second one's mark out."""
    accelerated, plain = accumulated(method, True), accumulated(method, False)
    torch.testing.assert_close(accelerated, plain)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(accelerated, accumulated(method, False, marked=1))


# Of two layers, how many routers move; what keeps its sets on original retain inputs; and of each step on its own.
MOVES = {"frozen_router": 0, "anchored": 0, "seuf": 1}
HOLDS_ORIGINAL = {"frozen_router", "anchored", "expert_specific", "full_null_space"}
HOLDS_STEP = {"frozen_router", "anchored", "expert_specific_minibatch"}


@pytest.mark.parametrize("name", [*METHODS, "no constraint"])
def test_every_method_does_what_it_says_in_one_loop(name):
    """Written once with the marks and the penalty, a loop serves all methods; no constraint is the control."""
    model = small_model()
    optimizer = adamw(model, lr=0.05)
    forget = [random_batch(seed=step) for step in range(3)]
    retain = [random_batch(rows=1, seed=seed) for seed in (100, 101)]  # fewer tokens than dimensions
    method = METHODS.get(name, Method(constraint="none"))
    original, thetas, by_step = MoEModel(model).trace(retain), thetas_of(model), []
    experts = model.model.layers[1].mlp.experts.down_proj.detach().clone()
    with gripmoe.constrain(model, optimizer, retain, forget=forget, method=method) as handle:
        for step in range(3):
            seen = handle.model.trace([retain[step % 2]])
            optimizer.zero_grad()
            with handle.forget():
                loss = -0.1 * loss_of(model, forget[step])
            (loss + handle.penalty()).backward()
            with handle.retain():
                loss = loss_of(model, retain[step % 2])
            (loss + handle.penalty()).backward()
            optimizer.step()
            by_step.append(router_only_stability(seen, model))
    moved = [not torch.equal(old, now) for old, now in zip(thetas, thetas_of(model), strict=True)]
    assert sum(moved) == MOVES.get(name, 2)
    assert not torch.equal(experts, model.model.layers[1].mlp.experts.down_proj) or name == "seuf"
    in_all, in_each = router_only_stability(original, model), min(by_step)
    if name in HOLDS_ORIGINAL:
        assert in_all == 1.0
    if name in HOLDS_STEP:
        assert in_each == 1.0
    if name == "no constraint":
        assert max(in_all, in_each) < 1.0


def step_of(model, optimizer, handle, batch):
    """One marked retain pass, with whatever the method adds to the loss."""
    optimizer.zero_grad()
    with handle.retain():
        loss = loss_of(model, batch)
    (loss + handle.penalty()).backward()
    optimizer.step()


def thetas_of(model):
    return [layer.mlp.gate.weight.detach().clone() for layer in model.model.layers]


def equal(some, others):
    return all(map(torch.equal, some, others))


@pytest.mark.parametrize("by_closure", [False, True])
def test_a_pass_that_is_not_marked_is_an_error_before_anything_moves(by_closure):
    model = small_model()
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, method="expert_specific_paper") as handle:

        def closure(marked=True):
            optimizer.zero_grad()
            with handle.retain() if marked else nullcontext():
                loss = loss_of(model, RETAIN[0])
            loss.backward()
            return loss

        def step(marked):
            if by_closure:
                return optimizer.step(lambda: closure(marked))
            closure(marked)
            return optimizer.step()

        for _ in range(2):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with pytest.raises(
                RuntimeError, match=r"retain forward: run it within `with handle.retain\(\):`, in every step"
            ):
                step(marked=False)
            assert equal(model.parameters(), before)
            loss = step(marked=True)
            assert not equal(model.parameters(), before), "the control"
            assert (loss is not None) == by_closure, "and the step returns what its closure does"


def gradients(method, **checkpointing):
    """Of the penalty alone, on a model whose hidden states have left the original ones."""
    model = small_model().train()
    if checkpointing:
        model.activation_checkpointing_enable(checkpointing)
    handle = gripmoe.constrain(model, adamw(model), RETAIN, method=method)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
    with handle.retain():
        model(**RETAIN[0].inputs)
    handle.penalty().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.parametrize("method", ["anchored", Method(constraint="routing_scores")], ids=["anchored", "scores"])
def test_a_penalty_has_the_same_gradient_where_activations_are_computed_again(method):
    """Reentrant checkpointing would drop the part of it that goes through the routers, and is refused."""
    plain = gradients(method)
    torch.testing.assert_close(gradients(method, use_reentrant=False), plain)
    assert max(gradient.abs().max() for gradient in plain) > 0.1, "the control"
    with pytest.raises(RuntimeError, match='"use_reentrant": False'):
        gradients(method, use_reentrant=True)


def test_what_takes_no_gradient_through_routers_bears_reentrant_checkpointing():
    routers = []
    for checkpointing in ({}, {"use_reentrant": True}):
        model = small_model().train()
        if checkpointing:
            model.activation_checkpointing_enable(checkpointing)
            model.enable_input_require_grads()
        optimizer = adamw(model)
        with gripmoe.constrain(model, optimizer, RETAIN, method="expert_specific_minibatch") as handle:
            step_of(model, optimizer, handle, RETAIN[0])
        routers.append(thetas_of(model))
    torch.testing.assert_close(*routers)


@pytest.mark.parametrize("method", ["expert_specific_minibatch", "expert_specific", "frozen_router"])
def test_a_closed_handle_says_so_where_it_would_constrain(method):
    """Not in evaluation, and not where the method looks at no pass: a loop may contain the marks of any method."""
    model = small_model()
    optimizer = adamw(model)
    handle = gripmoe.constrain(model, optimizer, RETAIN, method=method)
    with handle, handle.retain():
        model(**RETAIN[0].inputs)
    with pytest.raises(RuntimeError, match="this handle is closed"), handle:
        pass
    for use in (lambda: handle.retain().__enter__(), handle.penalty):
        with pytest.raises(RuntimeError, match="closed") if method.endswith("minibatch") else nullcontext():
            use()
    model.eval()
    with torch.no_grad(), handle.retain():
        assert handle.penalty() == 0.0


def test_writes_to_data_are_told_of_at_the_end():
    """Optimizers of other libraries write so, and torch counts no such write."""
    model = small_model()
    optimizer = adamw(model)
    with pytest.warns(UserWarning, match=r"routers of layers \[1\] have changed since the last step"):
        with gripmoe.constrain(model, optimizer, RETAIN) as handle:
            step_of(model, optimizer, handle, RETAIN[0])
            optimizer.step()
            model.model.layers[1].mlp.gate.weight.data.add_(0.1)


def test_what_a_step_writes_after_the_step_within_it_is_told_of():
    """torch calls the hooks of both, once a plain optimizer of the parent class was made."""

    class Shrinking(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    torch._foreach_mul_(group["params"], 0.99)

    model = small_model()
    adamw(model)
    optimizer = Shrinking(model.parameters(), lr=1e-3, weight_decay=0.0)
    with pytest.warns(UserWarning, match=r"routers of layers \[.*\] have changed since the last step"):
        with gripmoe.constrain(model, optimizer, RETAIN) as handle:
            step_of(model, optimizer, handle, RETAIN[0])
            optimizer.step()


def test_a_warning_at_the_end_that_is_made_an_error_leaves_the_model_free():
    model = small_model()
    handle = gripmoe.constrain(model, optimizer := adamw(model), RETAIN)
    step_of(model, optimizer, handle, RETAIN[0])
    optimizer.step()
    model.model.layers[1].mlp.gate.weight.data.add_(0.1)
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="have changed since the last step"):
        handle.close()
    gripmoe.constrain(model, adamw(model), RETAIN).close()


@pytest.mark.parametrize("writes", ["another optimizer", "a hand", "nobody", "an evaluation"])
def test_routers_that_something_else_has_written_are_told_of(writes):
    """Also when the handle closes. What restores them is not told of."""
    model = small_model()
    optimizer, another = adamw(model), adamw(model)
    handle = gripmoe.constrain(model, optimizer, RETAIN)
    router = model.model.layers[1].mlp.gate.weight

    def write():
        step_of(model, optimizer, handle, RETAIN[0])
        if writes == "another optimizer":
            another.step()
        elif writes != "nobody":
            own = router.detach().clone()
            with torch.no_grad():
                router.mul_(1.5)
                if writes == "an evaluation":
                    router.copy_(own)

    for ends in (optimizer.step, handle.close):
        write()
        with warnings.catch_warnings(record=True, action="always") as seen:
            ends()
        told = [each for each in seen if "have changed since the last step" in str(each.message)]
        assert len(told) == (writes in ("another optimizer", "a hand"))
        assert all(each.filename == __file__ for each in told), "the warning points into the loop"


@pytest.mark.parametrize("method", ["expert_specific", "expert_specific_paper"])
def test_a_step_within_autocast_is_projected_in_full_precision(method):
    """Of the null space a rounded projection keeps two digits."""
    ends = []
    for enabled in (False, True):
        model = small_model()
        optimizer = adamw(model)
        with gripmoe.constrain(model, optimizer, RETAIN, method=method) as handle:
            for batch in RETAIN:
                with handle.retain():
                    loss_of(model, batch).backward()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                    optimizer.step()
                optimizer.zero_grad()
        ends.append(MoEModel(model).thetas())
    for layer, theta in ends[0].items():
        assert torch.equal(theta, ends[1][layer])


@pytest.mark.parametrize(
    "rows", [torch.tensor([True]), torch.arange(4), [True] * 4, torch.ones(5, dtype=torch.bool)], ids=str
)
def test_rows_are_a_mask_with_an_entry_for_each(rows):
    model = small_model()
    handle = gripmoe.constrain(model, adamw(model), RETAIN, method="anchored")
    with pytest.raises(ValueError, match="`rows` must be a bool tensor with an entry for each of the 4 rows, not "):
        with handle.retain(rows=rows):
            model(**RETAIN[0].inputs)
    assert handle.penalty() == 0
    with handle.retain(rows=torch.ones(4, dtype=torch.bool)):
        model(**RETAIN[0].inputs)
    assert isinstance(handle.penalty(), torch.Tensor), "the control"


def test_a_second_handle_on_a_model_is_refused_until_the_first_is_closed():
    """It would constrain other routers, and the first to be closed would take what both need off the model."""
    model = small_model()
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN):
        constrained = traces_of_a_handle(model, optimizer)
        with pytest.raises(ValueError, match="another handle holds this model: `close\(\)` it first"):
            gripmoe.constrain(model, optimizer, RETAIN, method="frozen_router")
        assert traces_of_a_handle(model, optimizer) == constrained
        other = copy.deepcopy(model)
        gripmoe.constrain(other, adamw(other), RETAIN).close()
    gripmoe.constrain(model, optimizer, RETAIN, method="frozen_router").close()


def resumed(method, with_state=True, from_original=True):
    """Six steps, interrupted after three and continued by a new model, optimizer and handle; the weights at the end."""
    model = small_model()
    optimizer = adamw(model, lr=0.01)
    with gripmoe.constrain(model, optimizer, RETAIN, method=method) as handle:
        for step in range(3):
            step_of(model, optimizer, handle, RETAIN[step % 2])
        weights, moments, state = (copy.deepcopy(part.state_dict()) for part in (model, optimizer, handle))
        if with_state is None:  # not interrupted
            for step in range(3, 6):
                step_of(model, optimizer, handle, RETAIN[step % 2])
            return list(model.parameters())
    model = small_model()
    optimizer = adamw(model, lr=0.01)
    if not from_original:
        model.load_state_dict(weights)
    with gripmoe.constrain(model, optimizer, RETAIN, method=method) as handle:
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        if with_state:
            handle.load_state_dict(state)
        for step in range(3, 6):
            step_of(model, optimizer, handle, RETAIN[step % 2])
    return list(model.parameters())


@pytest.mark.parametrize("method", ["expert_specific", EVERY_2, PAPER, CACHED, "anchored"])
def test_training_resumes_where_it_was(method):
    """To the bit; the control is what a handle forgets without its state, save sound Method A, which has nothing to."""
    uninterrupted = resumed(method, with_state=None)
    assert equal(resumed(method), uninterrupted)
    assert equal(resumed(method, with_state=False), uninterrupted) == (method == "expert_specific")
    with pytest.raises(ValueError, match="call gripmoe.constrain on the original model"):
        resumed(method, from_original=False)


def test_routers_wait_for_their_projection():
    """At every second step, when the loop asks for it, and when the handle closes. The control: between, they move."""
    model, kept = small_model(), []
    moe = MoEModel(model)
    trace, optimizer = moe.trace(RETAIN), adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, method=EVERY_2) as handle:
        for step in range(4):
            step_of(model, optimizer, handle, RETAIN[step % 2])
            kept.append(router_only_stability(trace, model))
        assert kept[1] == kept[3] == 1.0 and kept[0] < 1.0 and kept[2] < 1.0
        step_of(model, optimizer, handle, RETAIN[0])
        handle.settle()
        assert router_only_stability(trace, model) == 1.0
        settled = moe.thetas()
        handle.settle()
        assert equal(moe.thetas().values(), settled.values()), "nothing waits"
        step_of(model, optimizer, handle, RETAIN[1])
        assert router_only_stability(trace, model) < 1.0, "the count begins anew"
    assert router_only_stability(trace, model) == 1.0


def test_what_is_not_finite_closes_without_a_projection():
    model = small_model()
    optimizer = adamw(model)
    handle = gripmoe.constrain(model, optimizer, RETAIN, method=EVERY_2)
    step_of(model, optimizer, handle, RETAIN[0])
    with torch.no_grad():
        MoEModel(model).theta(0).fill_(torch.nan)
    handle.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    handle.settle()


def test_a_state_is_of_its_method_and_its_documents():
    model = small_model()
    settings = [{"retain": RETAIN}, {"retain": RETAIN[::-1]}, {"retain": RETAIN[:1]}, {"method": "frozen_router"}]
    states = []
    for setting in settings:
        with gripmoe.constrain(model, adamw(model), **{"retain": RETAIN, **setting}) as handle:
            states.append(handle.state_dict())
    with gripmoe.constrain(model, adamw(model), RETAIN) as handle:
        for state in states[:2]:  # in whatever order documents come
            handle.load_state_dict(state)
        for state in (*states[2:], {}):
            with pytest.raises(ValueError, match="of another model, method or documents"):
                handle.load_state_dict(state)


def test_a_state_stays_as_it_was_taken():
    model = small_model()
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, method=CACHED) as handle:
        step_of(model, optimizer, handle, RETAIN[0])
        state = handle.state_dict()
        kept = copy.deepcopy(state)
        step_of(model, optimizer, handle, RETAIN[1])
        assert all(torch.equal(state["cached"][layer], kept["cached"][layer]) for layer in kept["cached"])
        assert not torch.equal(handle.state_dict()["cached"][0], kept["cached"][0]), "the control"


def test_mistakes():
    model = small_model()
    with pytest.raises(ValueError, match="unknown name 'magic'; .*known: unconstrained, frozen_router"):
        gripmoe.constrain(model, adamw(model), RETAIN, method="magic")
    experts_only = torch.optim.AdamW(MoEModel(model).expert_parameters(0))
    with pytest.raises(ValueError, match=r"does not hold the routers of layers \[0, 1\]"):
        gripmoe.constrain(model, experts_only, RETAIN)
    with pytest.raises(ValueError, match="nothing to trace"):
        gripmoe.constrain(model, adamw(model), [])
    with pytest.raises(ValueError, match="routing_stability\n.*should be less than 1"):
        Method(constraint="anchor", routing_stability=1.0)
    with gripmoe.constrain(model, adamw(model), RETAIN, method="anchored") as handle:
        with pytest.raises(ValueError, match="knows documents by their tokens: give `input_ids`"), handle.retain():
            model(inputs_embeds=model.model.embed_tokens(RETAIN[0].input_ids))
    with gripmoe.constrain(model, adamw(model), RETAIN, replay=True):
        with pytest.raises(ValueError, match="finds the routes of a pass by its tokens: give `input_ids`"):
            model.train()(inputs_embeds=model.model.embed_tokens(RETAIN[0].input_ids))
    with pytest.raises(ValueError, match="unknown form 'best'"):
        gripmoe.realign(model, gripmoe.remember(model, RETAIN), form="best")


def test_a_marked_pass_may_be_of_the_decoder_alone():
    """With tokens by position, as RMU's code calls it."""
    model = small_model()
    with gripmoe.constrain(model, adamw(model), RETAIN, method="anchored") as handle:
        with handle.retain():
            model.model(RETAIN[0].input_ids, attention_mask=RETAIN[0].attention_mask)
        by_position = handle.penalty()
        with handle.retain():
            model.model(**RETAIN[0].inputs)
        assert torch.equal(by_position, handle.penalty())


def left_padded(batch):
    moved = collate_inputs([batch])
    for i, mask in enumerate(batch.attention_mask):
        shift = int((mask == 0).sum())
        moved.input_ids[i], moved.attention_mask[i] = batch.input_ids[i].roll(shift), mask.roll(shift)
    return moved


@pytest.mark.parametrize("method", ["anchored", Method(constraint="routing_scores")], ids=["anchored", "scores"])
def test_references_belong_to_their_tokens(method):
    """On an untouched model there is nothing to pay: on whichever side rows are padded, of a mixed batch too."""
    model = small_model()
    handle = gripmoe.constrain(model, adamw(model), RETAIN, method=method)
    for batch, rows in ((RETAIN[0], None), (left_padded(RETAIN[0]), None), (RETAIN[0], [True, False, True, False])):
        with handle.retain(rows=None if rows is None else torch.tensor(rows)):
            model(**batch.inputs)
        assert abs(handle.penalty().item()) < 1e-6
    with handle.retain(rows=torch.tensor([False] * 4)):
        model(**RETAIN[0].inputs)
    assert handle.penalty() == 0, "none of its rows is to be retained"
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
    with handle.retain():
        model(**RETAIN[0].inputs)
    assert handle.penalty().item() > 0.01


def traces_of_a_handle(model, optimizer):
    """Everything on model and optimizer that was not there by itself."""
    modules = [model, *model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
    steps = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    attributes = [sorted(vars(module)) for module in modules]
    return hooks, steps, attributes, [(p.dtype, p.requires_grad) for p in model.parameters()]


@pytest.mark.parametrize("method", METHODS)
def test_a_closed_handle_leaves_nothing_behind(method):
    model = small_model()
    optimizer = adamw(model)
    before = traces_of_a_handle(model, optimizer)
    with gripmoe.constrain(model, optimizer, RETAIN, method=method, forget=RETAIN, replay=True):
        constrained = traces_of_a_handle(model, optimizer)
        hooks, steps, _, _ = constrained
        assert sum(hooks) > 2 * 2 and steps >= 2, "the control"
    assert traces_of_a_handle(model, optimizer) == before != constrained


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_in_one_of_several_processes_waits_for_no_other(processes, monkeypatch):
    """Settling is a collective, in which processes without the error do not take part. Alone, the routers settle."""
    model = small_model()
    optimizer = adamw(model)
    handle = gripmoe.constrain(model, optimizer, RETAIN, method="expert_specific_every_10")
    loss_of(model, RETAIN[0]).backward()
    optimizer.step()
    settled = []
    monkeypatch.setattr(handle, "_write_feasible", lambda: settled.append(True))
    monkeypatch.setattr("gripmoe.constraints.hooks.distributed.processes", lambda: processes)
    with pytest.raises(OSError), handle:
        raise OSError
    assert bool(settled) == (processes == 1)


def test_a_gradient_that_is_climbed_is_projected_as_one_that_is_descended():
    """With the sign of a descent Stage 2 would bound the other direction."""
    weaker = {"eps_null": EpsNullConfig(value=0.3, kind="relative")}
    method = method_table()["expert_specific_paper_gradient"].model_copy(update=weaker)
    kept = []
    for sign, maximize in ((1, False), (-1, True)):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=20.0, maximize=maximize)
        with gripmoe.constrain(model, optimizer, RETAIN, method=method) as handle:
            with handle.retain():
                loss = loss_of(model, RETAIN[0])
            (sign * (loss - 3 * loss_of(model, random_batch(seed=1)))).backward()
            optimizer.step()
            assert handle.constraint.observed()["stage_2_rate"] > 0, "a margin is in reach"
        kept.append(torch.cat(thetas_of(model)))
    torch.testing.assert_close(*kept)


def test_a_gradient_that_is_climbed_is_projected_so_at_a_rate_of_0_too():
    """As a warm-up begins, where margins are used up."""
    update = {"safety_margin": 10.0, "kaczmarz_tolerance": 0.0}
    method, kept = method_table()["expert_specific_paper_gradient"].model_copy(update=update), []
    for sign, maximize in ((1, False), (-1, True)):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, maximize=maximize)
        with gripmoe.constrain(model, optimizer, RETAIN, method=method) as handle:
            with handle.retain():
                loss = loss_of(model, RETAIN[0])
            (sign * loss).backward()
            optimizer.step()
            assert handle.constraint.observed()["stage_2_rate"] > 0, "a margin is in reach"
        kept.append(sign * MoEModel(model).theta(0).grad)
    torch.testing.assert_close(*kept)


def test_method_b_leaves_nothing_behind_either():
    model = small_model()
    optimizer = adamw(model)
    before = traces_of_a_handle(model, optimizer)
    original = gripmoe.remember(model, RETAIN)
    gripmoe.realign(model, original)
    assert traces_of_a_handle(model, optimizer) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_method_b_refuses_leaves_nothing_behind(dtype):
    """In bf16 routers are in fp32 meanwhile."""
    model = small_model().to(dtype)
    optimizer = adamw(model)
    before = traces_of_a_handle(model, optimizer)
    one_token = {"input_ids": torch.tensor([[5, 6]])}
    with pytest.raises(ValueError, match="`retain` holds no batches"):
        gripmoe.remember(model, [])
    with pytest.raises(ValueError, match="`retain` holds 1 tokens that count.* fits well from 128"):
        gripmoe.remember(model, [one_token])
    with pytest.raises(ValueError, match="must be a tensor"):
        gripmoe.routed_experts(model, torch.tensor([5, 6]))
    assert traces_of_a_handle(model, optimizer) == before
    two = gripmoe.remember(model, [{"input_ids": torch.tensor([[5, 6, 7]])}])
    assert set(gripmoe.realign(model, two)) == {0, 1}, "the control"
    before = traces_of_a_handle(model, optimizer)
    disturbed = replace(two, theta_0={})
    with pytest.raises(ValueError, match="of layers"):
        gripmoe.realign(model, disturbed)
    assert traces_of_a_handle(model, optimizer) == before


def test_a_handle_that_is_refused_leaves_nothing_behind():
    model = small_model()
    experts_only = torch.optim.AdamW(MoEModel(model).expert_parameters(0))
    MoEModel(model)
    before = traces_of_a_handle(model, experts_only)
    with pytest.raises(ValueError, match="does not hold the routers"):
        gripmoe.constrain(model, experts_only, RETAIN)
    assert traces_of_a_handle(model, experts_only) == before


def selected_scores_moved(trace, model):
    moe = MoEModel(model)
    moved = {
        layer: (moe.rule(layer).scores(r.x_Nd.float(), moe.theta(layer)) - r.scores_NE).abs()
        for layer, r in trace.items()
    }
    return max(moved[layer].gather(1, r.top_k_Nk).max().item() for layer, r in trace.items())


def test_routers_of_low_precision_stay_in_fp32_for_rounding_undoes_the_constraint():
    """What close() does not undo, and why; `MoEModel.release` does, for who wants it."""
    model = small_model().bfloat16()
    optimizer = adamw(model, lr=1e-2)
    handle = gripmoe.constrain(model, optimizer, RETAIN)
    trace = handle.model.trace(RETAIN)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, random_batch(seed=step)).backward()
        optimizer.step()
    handle.close()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    assert model(**RETAIN[0].inputs).logits.dtype == torch.bfloat16, "and the model runs"
    assert selected_scores_moved(trace, model) < 1e-3
    copied = copy.deepcopy(model)
    handle.model.release(to_own_dtype=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert selected_scores_moved(trace, model) > 1e-2
    assert copied(**RETAIN[0].inputs).logits.isfinite().all(), "a copy has hooks of its own"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("copied", [False, True])
def test_a_model_that_is_cast_after_its_handle_is_closed_runs(dtype, copied):
    """Its routers with it. The control: until then they are in fp32."""
    model = small_model().bfloat16()
    gripmoe.constrain(model, adamw(model), RETAIN).close()
    assert model.model.layers[0].mlp.gate.weight.dtype == torch.float32
    cast = (copy.deepcopy(model) if copied else model).to(dtype)
    assert cast.model.layers[0].mlp.gate.weight.dtype == dtype
    assert cast(**RETAIN[0].inputs).logits.isfinite().all()


def test_what_a_handle_cannot_do_is_refused():
    model = small_model()
    for method, reason in (
        (Method(baseline="original"), "trains nothing"),
        (Method(constraint="none", correction="realign"), "after training"),
        (Method(corrects="unconstrained", correction="restore"), "gripmoe.realign"),
    ):
        with pytest.raises(ValueError, match=f"cannot do .*{reason}"):
            gripmoe.constrain(model, adamw(model), RETAIN, method=method)
    for method in ("seuf", METHODS["expert_specific"].model_copy(update={"surface": "forget"})):
        with pytest.raises(ValueError, match="give batches of it as `forget`"):
            gripmoe.constrain(model, adamw(model), RETAIN, method=method)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["expert_specific", "frozen_router", "anchored"])
def test_data_parallel_training(method, process_group):
    """A method that freezes routers has to do so before the model is wrapped, and says so."""
    if method != "expert_specific":
        model = small_model()
        with pytest.raises(ValueError, match="before it wraps"):
            gripmoe.constrain(DistributedDataParallel(model), adamw(model), RETAIN, method=method)
        assert model.model.layers[0].mlp.gate.weight.requires_grad
    weights = {}
    for kind in ("plain", "wrapped", "unconstrained"):
        model = small_model()
        optimizer = adamw(model)
        handle = gripmoe.constrain(
            model, optimizer, RETAIN, method=Method(constraint="none") if kind == "unconstrained" else method
        )
        # Not every expert is used in every step.
        called = DistributedDataParallel(model, find_unused_parameters=True) if kind == "wrapped" else model
        for _ in range(3):
            optimizer.zero_grad()
            with handle.retain():
                loss = loss_of(called, RETAIN[0])
            (loss + handle.penalty()).backward()
            optimizer.step()
        weights[kind] = [parameter.detach() for parameter in model.parameters()]
    torch.testing.assert_close(weights["wrapped"], weights["plain"])
    assert not torch.equal(weights["plain"][0], weights["unconstrained"][0]), "the control"


def test_routers_of_low_precision_are_constrained_before_they_are_wrapped(process_group):
    """Data parallelism does not reduce the gradient of a parameter whose dtype changes later."""
    model = small_model().bfloat16()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    with pytest.raises(ValueError, match="before it wraps the model"):
        gripmoe.constrain(wrapped, adamw(model), RETAIN)
    assert model.model.layers[0].mlp.gate.weight.dtype == torch.bfloat16, "as it was"
    MoEModel(wrapped.module)
    with gripmoe.constrain(DistributedDataParallel(model, find_unused_parameters=True), adamw(model), RETAIN):
        pass


class Adapted(torch.nn.Module):
    """What PEFT makes of a model, as far as it says."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model


def test_a_model_that_peft_has_wrapped():
    model = small_model()
    with gripmoe.constrain(Adapted(model), adamw(model), RETAIN) as handle:
        assert handle.model.model is model


def test_routers_that_others_have_sharded_are_refused(process_group):
    model = small_model()
    gate = model.model.layers[0].mlp.gate
    gate.weight = torch.nn.Parameter(distribute_tensor(gate.weight, init_device_mesh("cpu", (1,)), [Shard(0)]))
    optimizer = adamw(model)
    before = traces_of_a_handle(model, optimizer)
    with pytest.raises(ValueError, match="the routers of this .* are sharded.*gripmoe.shard_experts"):
        gripmoe.constrain(model, optimizer, RETAIN)
    assert traces_of_a_handle(model, optimizer) == before


def test_projected_gradients_end_where_projected_updates_do_under_sgd_and_not_under_adamw():
    """The paper says both. Momentum and weight decay leave the null space again. The steps of SGD are so long that some
    exceed a margin."""
    rates, ends, drawn = {torch.optim.SGD: 20.0, torch.optim.AdamW: 0.05}, {}, {}
    weaker = {"eps_null": EpsNullConfig(value=0.3, kind="relative")}
    for make, rate in rates.items():
        for projects in ("update", "gradient"):
            model = small_model()
            optimizer = make(model.parameters(), lr=rate)
            method = METHODS["expert_specific_paper"].model_copy(update={"projects": projects, **weaker})
            with gripmoe.constrain(model, optimizer, RETAIN, method=method) as handle:
                for batch in RETAIN:
                    step_of(model, optimizer, handle, batch)
                drawn[make, projects] = handle.constraint.observed()["stage_2_rate"]
            ends[make, projects] = torch.cat(thetas_of(model))
    start = torch.cat(thetas_of(small_model()))
    moved = {key: end - start for key, end in ends.items()}
    apart = {
        make: ((moved[make, "gradient"] - moved[make, "update"]).norm() / moved[make, "update"].norm()).item()
        for make in rates
    }
    assert apart[torch.optim.SGD] < 1e-3 and apart[torch.optim.AdamW] > 0.1
    assert drawn[torch.optim.SGD, "gradient"] == drawn[torch.optim.SGD, "update"] > 0


@pytest.mark.parametrize("rate", [1e-3, 1e-5, 0.0])
@pytest.mark.parametrize("method", ["reparameterized", "expert_specific_paper_gradient"])
def test_momentum_keeps_the_projected_gradient_at_every_rate(method, rate):
    """At 0 too, where a warm-up begins. The control: the gradient as it was lies outside of the null space."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.0, 0.999), weight_decay=0.0)
    with gripmoe.constrain(model, optimizer, RETAIN[:1], method=method) as handle:
        with handle.retain():
            loss_of(model, RETAIN[0]).backward()
        loss_of(model, random_batch(seed=1)).backward()
        thetas = {layer: handle.model.theta(layer) for layer in handle.model.layers}
        gradients, seen = {layer: theta.grad.double() for layer, theta in thetas.items()}, handle._seen
        optimizer.step()
        for layer, gradient in gradients.items():
            bases = handle.constraint.bases
            basis = bases[layer] if bases else handle.constraint._minibatch_basis(layer, seen[0][layer])
            wanted, kept = basis.double().project(gradient), optimizer.state[thetas[layer]]["exp_avg"]
            assert (kept - wanted).norm() < 1e-3 * wanted.norm()
            assert (gradient - wanted).norm() > 0.1 * gradient.norm()


def test_a_scaled_gradient_that_a_fused_optimizer_divides_is_projected_as_the_plain_one():
    """The control: at a rate as many times larger the steps exceed margins, and other directions are left."""
    kept = {}
    for rate, scale in ((1e-3, 1.0), (1e-3, 2.0**16), (1e-3 * 2.0**16, 1.0)):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with gripmoe.constrain(model, optimizer, RETAIN, method="expert_specific_paper_gradient") as handle:
            with handle.retain():
                loss = loss_of(model, RETAIN[0])
            scaler.scale(loss - loss_of(model, random_batch(seed=1))).backward()
            scaler.step(optimizer)
            thetas = [handle.model.theta(layer) for layer in handle.model.layers]
        kept[rate, scale] = torch.cat([optimizer.state[theta]["exp_avg"] for theta in thetas])
    plain, scaled, longer = kept.values()
    torch.testing.assert_close(scaled, plain, rtol=1e-3, atol=1e-3 * plain.abs().max().item())
    assert (longer - plain).norm() > 0.1 * plain.norm()


@pytest.mark.parametrize("method", ["anchored", "routing_scores"])
def test_a_soft_method_that_a_loop_leaves_out_is_an_error(method, batch):
    """And not a frozen router in silence: a retain pass that is not marked, a penalty that is not added."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gripmoe.constrain(model, optimizer, [batch], method=method) as handle:
        model(**batch.inputs, labels=batch.input_ids).loss.backward()
        with pytest.raises(RuntimeError, match=r"retain forward: run it within `with handle.retain\(\):`"):
            optimizer.step()
        with handle.retain():
            loss = model(**batch.inputs, labels=batch.input_ids).loss
        loss.backward()
        with pytest.raises(RuntimeError, match=r"add `handle.penalty\(\)` to it"):
            optimizer.step()
        handle.penalty()
        with handle.retain():
            loss = model(**batch.inputs, labels=batch.input_ids).loss
        (loss + handle.penalty()).backward()
        optimizer.step()


def projected_by(handle, layer, function):
    """Puts `function` in place of the projection of one layer's update."""
    constrain = handle.constraint.constrain
    handle.constraint.constrain = lambda at, *seen: (function if at == layer else constrain)(at, *seen)
    return constrain


@pytest.mark.parametrize("method", ["expert_specific_paper", "anchored"])
def test_evaluations_within_marks_do_not_count(method):
    """Of documents that nobody listed, however many. They do not stand for a step's own mark: the control is a marked
    pass that trains."""
    model = small_model()
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, method=method) as handle:
        for trains in (False, True):
            model.eval()
            for seed in range(3):
                with torch.no_grad(), handle.retain():
                    model(**random_batch(seed=seed).inputs)
                assert not handle._seen and handle.penalty() == 0
            model.train()
            with handle.retain() if trains else nullcontext():
                loss = loss_of(model, RETAIN[0])
            (loss + handle.penalty()).backward()
            with nullcontext() if trains else pytest.raises(RuntimeError, match="run it within"):
                optimizer.step()


def test_a_pass_in_training_mode_counts_without_gradients_too():
    """A loop may look at retain tokens for the projection alone."""
    model = small_model().train()
    handle, _ = spied(model, adamw(model))
    with torch.no_grad(), handle.retain():
        model(**RETAIN[0].inputs)
    assert len(handle._seen) == 1


@pytest.mark.parametrize("method", [PAPER, "anchored"], ids=["paper", "anchored"])
def test_a_batch_that_is_given_up_leaves_no_trace(method):
    """After `skip`. The control: without it, its pass counts in the next step."""
    ends = {}
    for given_up, skips in ((False, False), (True, True), (True, False)):
        model = small_model()
        optimizer = adamw(model, lr=1e-2)
        with gripmoe.constrain(model, optimizer, RETAIN, method=method, loss_bound=100.0) as handle:
            for step in range(3):
                if given_up and step == 1:
                    with handle.retain():
                        handle.check(loss_of(model, RETAIN[1]))
                if skips:
                    handle.skip()
                optimizer.zero_grad()
                with handle.retain():
                    handle.check(loss := loss_of(model, RETAIN[0]))
                (loss + handle.penalty()).backward()
                optimizer.step()
        ends[given_up, skips] = list(model.parameters())
    assert equal(ends[True, True], ends[False, False])
    assert not equal(ends[True, False], ends[False, False])


def test_what_is_skipped_is_no_mark_and_no_check():
    model = small_model()
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, method="anchored", loss_bound=100.0) as handle:
        for marks, told in ((False, "run it within"), (True, "call `handle.check")):
            with handle.retain():
                handle.check(loss_of(model, RETAIN[0]))
            handle.skip()
            assert handle.penalty() == 0
            with handle.retain() if marks else nullcontext():
                loss = loss_of(model, RETAIN[0])
            (loss + handle.penalty()).backward()
            with pytest.raises(RuntimeError, match=told):
                optimizer.step()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_projection_that_fails_leaves_the_routers_of_the_step_before(error):
    def fail(*_):
        raise error("deliberate")

    model = small_model()
    optimizer = adamw(model)
    trace, before = MoEModel(model).trace(RETAIN), thetas_of(model)
    with gripmoe.constrain(model, optimizer, RETAIN) as handle:
        projection = projected_by(handle, 1, fail)
        experts = model.model.layers[0].mlp.experts.down_proj.detach().clone()
        with pytest.raises(error, match="deliberate"):
            step_of(model, optimizer, handle, random_batch(seed=1))
        assert equal(thetas_of(model), before)
        assert not torch.equal(model.model.layers[0].mlp.experts.down_proj, experts), "the control: there was a step"
        handle.constraint.constrain = projection
        step_of(model, optimizer, handle, random_batch(seed=1))
    assert not equal(thetas_of(model), before) and router_only_stability(trace, model) == 1.0


@pytest.mark.parametrize("method", [Method(constraint="none"), "expert_specific", "expert_specific_paper"], ids=str)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_leaves_the_routers_of_the_step_before(method, number):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = thetas_of(model)
    with gripmoe.constrain(model, optimizer, RETAIN, method=method) as handle:
        with handle.retain():
            loss_of(model, RETAIN[0]).backward()
        model.model.layers[1].mlp.gate.weight.grad[3, 5] = number
        with pytest.raises(gripmoe.Diverged, match=r"routers of layers \[1\] would not be finite"):
            optimizer.step()
        assert equal(thetas_of(model), before)
        step_of(model, optimizer, handle, RETAIN[0])
    assert not equal(thetas_of(model), before), "the control"


def test_a_projection_that_is_not_finite_leaves_the_routers_of_the_step_before():
    model = small_model()
    optimizer = adamw(model)
    before = thetas_of(model)
    with gripmoe.constrain(model, optimizer, RETAIN) as handle:
        projected_by(handle, 0, lambda at, before_Ed, after_Ed, seen: after_Ed / 0)
        with pytest.raises(gripmoe.Diverged, match=r"routers of layers \[0\] would not be finite"):
            step_of(model, optimizer, handle, RETAIN[0])
        assert equal(thetas_of(model), before)


@pytest.mark.parametrize("largest", [float("nan"), float("inf"), 3e38])
def test_routers_that_are_not_finite_are_refused(largest):
    """A large weight, whose square is infinite, is none of them."""
    model = small_model()
    optimizer = adamw(model)
    before = traces_of_a_handle(model, optimizer)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[3, 5] = largest
    if largest == 3e38:
        gripmoe.constrain(model, optimizer, RETAIN, method="frozen_router").close()
    else:
        with pytest.raises(ValueError, match=r"routers of layers \[1\] are not finite"):
            gripmoe.constrain(model, optimizer, RETAIN, method="frozen_router")
    assert traces_of_a_handle(model, optimizer) == before


@pytest.mark.parametrize("method", ["expert_specific", "frozen_router"])
def test_weights_that_make_inputs_of_routers_not_finite_are_refused(method):
    """Weights of layer 0, whose own router sees finite ones: the control."""
    model = small_model()
    optimizer = adamw(model)
    before = traces_of_a_handle(model, optimizer)
    with torch.no_grad():
        next(model.model.layers[0].mlp.experts.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match=r"routers of layers \[1\] see of `retain` is not finite") as refused:
        gripmoe.constrain(model, optimizer, RETAIN, method=method)
    assert traces_of_a_handle(model, optimizer) == before, f"while somebody holds {refused}"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1.0])
def test_a_loss_or_penalty_that_is_not_finite_ends_training(number):
    model = small_model()
    with gripmoe.constrain(model, adamw(model), RETAIN, method="anchored") as handle:
        ended = nullcontext() if number == 1.0 else pytest.raises(gripmoe.Diverged, match="retain loss (nan|inf)")
        with ended:
            handle.check(number)
        ended = nullcontext() if number == 1.0 else pytest.raises(gripmoe.Diverged, match="penalty (nan|inf)")
        penalty = handle.constraint.penalty
        handle.constraint.penalty = lambda *seen: penalty(*seen) + number
        with ended, handle.retain():
            model(**RETAIN[0].inputs)
        assert isinstance(handle.penalty(), torch.Tensor) == (number == 1.0)


class Wrapper:
    """Steps an optimizer and has no hooks."""

    def __init__(self, optimizer):
        self.inside, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state


@pytest.mark.parametrize("method", ["expert_specific", "anchored"])
@pytest.mark.parametrize("fault", ["no hooks", "half its hooks", "start"])
def test_a_handle_that_cannot_be_made_leaves_nothing_behind(method, fault, monkeypatch):
    """Routers of low precision get theirs back, and so does what the optimizer knows of them."""

    def fail(*_):
        raise RuntimeError("deliberate")

    model = small_model().bfloat16()
    optimizer = adamw(model, lr=1e-3)
    loss_of(model, RETAIN[0]).backward()
    optimizer.step()

    def traces():
        states = [state["exp_avg"].dtype for state in optimizer.state.values()]
        return traces_of_a_handle(model, optimizer), states

    before = traces()
    with monkeypatch.context() as patch:
        if fault == "half its hooks":
            patch.setattr(optimizer, "register_step_post_hook", fail)
        if fault == "start":
            patch.setattr("gripmoe.constraints.base.Unconstrained.start", fail)
            patch.setattr("gripmoe.constraints.null_space.NullSpace.start", fail)
            patch.setattr("gripmoe.constraints.anchor.Anchored.start", fail)
        no_hooks = pytest.raises(ValueError, match="Wrapper is no torch optimizer: give the one that it wraps")
        with no_hooks if fault == "no hooks" else pytest.raises(RuntimeError, match="deliberate"):
            gripmoe.constrain(model, Wrapper(optimizer) if fault == "no hooks" else optimizer, RETAIN, method=method)
    assert traces() == before
    with gripmoe.constrain(model, optimizer, RETAIN, method=method):
        assert traces() != before, "the control"


def test_an_optimizer_that_lacks_what_torchs_have_is_refused_before_anything_is_recorded():
    """As DeepSpeed's wrapper, which is of torch's class and never made as one."""

    class Bare(torch.optim.Optimizer):
        def __init__(self):
            pass

    with pytest.raises(ValueError, match="Bare is no torch optimizer: give the one that it wraps"):
        gripmoe.constrain(small_model(), Bare(), RETAIN)


def test_what_a_handle_is_told_to_undo_is_undone_once():
    model = small_model()
    done = []
    with gripmoe.constrain(model, adamw(model), RETAIN) as handle:
        for number in range(2):
            handle.on_close(lambda number=number: done.append(number))
        assert done == []
    handle.close()
    assert done == [1, 0]


class Counting(RouterConstraint):
    """Keeps a number, or nothing."""

    def __init__(self, number=None):
        self.number, self.loaded = number, []

    def state(self):
        return {} if self.number is None else {"number": self.number}

    def load_state(self, state):
        self.loaded.append(state["number"])


@pytest.mark.parametrize("number, loaded", [(None, []), (3, [3])])
def test_a_constraint_gets_its_state_back_if_it_has_one(number, loaded):
    model = small_model()
    with ConstraintHandle(MoEModel(model), adamw(model), Counting(number)) as handle:
        handle.load_state_dict(handle.state_dict())
    assert handle.constraint.loaded == loaded
