"""Soft constraints and the anchor: by hand, at their limits, and against the same training without them."""

import math

import pytest
import torch

from conftest import random_batch, small_model
from gripmoe.config.methods import Method
from gripmoe.constraints import anchor
from gripmoe.constraints.anchor import Anchored, DualWeight
from gripmoe.constraints.base import FrozenRouter, RouterConstraint
from gripmoe.constraints.baselines import GateAnchor, RouterL2, RoutingScores, attributed_expert
from gripmoe.constraints.build import build, held_bytes
from gripmoe.constraints.hooks import ConstraintHandle
from gripmoe.geometry.routing import LayerRouting, mean_stability, route, stability_by_layer
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel


@pytest.fixture
def moe():
    return MoEModel(small_model())


def handled(constraint, moe, batch):
    """The constraint over an optimizer, started on one document batch."""
    optimizer = torch.optim.AdamW(moe.model.parameters(), lr=3e-3)
    constraint.start(moe, [batch])
    return ConstraintHandle(moe, optimizer, constraint), optimizer


def penalty_of(handle, batch, kind="retain"):
    with getattr(handle, kind)():
        handle.model.model(**batch.inputs)
    return handle.penalty()


def disturb(moe, scale=0.05):
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in moe.layers:
            for parameter in moe.block(layer).parameters():
                parameter += scale * torch.randn_like(parameter)


def test_router_l2_by_hand(moe, batch):
    handle, _ = handled(RouterL2(weight=3.0), moe, batch)
    assert penalty_of(handle, batch).item() == 0
    before = moe.thetas()
    with torch.no_grad():
        moe.theta(0).add_(0.1)
    by_hand = 3.0 * (0.01 * before[0].numel() / before[0].square().sum()).item() / 2
    penalty = penalty_of(handle, batch)
    assert penalty.item() == pytest.approx(by_hand, rel=1e-4)
    penalty.backward()
    assert moe.theta(0).grad is not None and moe.expert_parameters(0)[0].grad is None


def test_gate_anchor_by_hand(moe, batch):
    handle, _ = handled(GateAnchor(1, 5, weight=2.0, alone=False), moe, batch)
    penalty = penalty_of(handle, batch, "forget").item()
    seen = moe.trace([batch])[1]
    gate = seen.scores_NE.softmax(-1)
    gate[:, 5] -= 1
    assert penalty == pytest.approx(2.0 * gate.square().sum(-1).mean().item(), rel=1e-5)
    assert penalty_of(handle, batch, "retain") == 0, "it looks at forget tokens only"


def test_attribution_finds_the_expert_that_serves_forget_tokens_most():
    def routing(scores):
        scores = torch.tensor(scores)
        return LayerRouting(torch.zeros(len(scores), 4), scores, scores.topk(1).indices)

    trace = {0: routing([[2.0, 0.0], [2.0, 0.0]]), 1: routing([[0.0, 5.0], [3.0, 0.0]]), 2: routing([[9.0, 0.0]] * 2)}
    mean = {(0, 0): 1 / (1 + math.exp(-2)), (1, 1): 0.5 / (1 + math.exp(-5))}
    assert mean[0, 0] > mean[1, 1]
    assert attributed_expert(trace, [0, 1]) == (0, 0)
    assert attributed_expert(trace, [0, 1, 2]) == (2, 0)
    often_second = {0: routing([[2.0, 1.9, -9.0]] * 3 + [[1.0, 5.0, 5.1]])}
    assert often_second[0].scores_NE.softmax(dim=-1).mean(dim=0).argmax() == 1
    assert attributed_expert(often_second, [0]) == (0, 0), "it is never selected"


def test_routing_scores_by_hand_and_their_gradient_reaches_experts(moe, batch):
    handle, _ = handled(RoutingScores(weight=2.0), moe, batch)
    before = moe.trace([batch])
    assert penalty_of(handle, batch).item() == pytest.approx(0, abs=1e-8)
    disturb(moe)
    after = moe.trace([batch])
    ratios = [(after[l].scores_NE - before[l].scores_NE).square().mean() / before[l].scores_NE.var() for l in before]
    penalty = penalty_of(handle, batch)
    assert penalty.item() == pytest.approx(2.0 * (sum(ratios) / 2).item(), rel=1e-3)
    penalty.backward()
    assert moe.expert_parameters(0)[0].grad.norm() > 0, "they move the next router's inputs"


@pytest.mark.parametrize("final_only", [False, True])
def test_anchor_by_hand(moe, batch, final_only):
    constraint = Anchored(0.95, floor=1.0, final_only=final_only)
    handle, _ = handled(constraint, moe, batch)
    before, hidden_before = moe.trace([batch]), final_hidden(moe, batch)
    assert penalty_of(handle, batch).item() == pytest.approx(0, abs=1e-6)
    disturb(moe)
    constraint.weight.value = 3.0
    after, hidden_after = moe.trace([batch]), final_hidden(moe, batch)
    ratio = (hidden_after - hidden_before).square().sum() / hidden_before.square().sum()
    if not final_only:
        moved = {layer: after[layer].x_Nd - seen.x_Nd for layer, seen in before.items()}
        ratio = ratio + sum(moved[layer].square().sum() / seen.x_Nd.square().sum() for layer, seen in before.items())
    assert penalty_of(handle, batch).item() == pytest.approx(3.0 * 10 / 2 * ratio.item(), rel=1e-3)
    assert constraint._errors[-1] != pytest.approx(0.05), "routing was not at the wanted stability"


def test_an_anchor_pays_for_states_whose_squares_fp16_cannot_hold(batch):
    """As in fp32. The control: their sum is infinite in fp16."""
    penalties = []
    for dtype in (torch.float32, torch.float16):
        moe = MoEModel(small_model().to(dtype))
        with torch.no_grad():
            moe.model.model.norm.weight.mul_(50.0)
        handle, _ = handled(Anchored(0.95, floor=1.0, final_only=True), moe, batch)
        assert final_hidden(moe, batch).square().sum().isinf() == (dtype == torch.float16)
        with torch.no_grad():
            moe.model.model.norm.weight.mul_(1.5)
        penalties.append(penalty_of(handle, batch).item())
    assert penalties[1] == pytest.approx(penalties[0], rel=1e-2) and penalties[0] > 1


def test_an_unchanged_model_routes_as_the_original_under_autocast_too(moe):
    """The pass itself is in fp32. The control: in bf16 the original router selects other experts of some tokens."""
    constraint, batch = Anchored(0.95, floor=1.0), random_batch(rows=64)
    handle, _ = handled(constraint, moe, batch)
    trace = moe.trace([batch])
    with torch.autocast("cpu", torch.bfloat16):
        with handle.retain(), torch.autocast("cpu", enabled=False):
            moe.model(**batch.inputs)
        rounded = {n: route(seen.x_Nd, moe.theta(n).detach(), moe.rule(n)) for n, seen in trace.items()}
    assert constraint._errors == [0.0] and mean_stability(stability_by_layer(trace, rounded)) < 1.0


def final_hidden(moe, batch):
    with torch.no_grad():
        hidden = moe.model.model(**batch.inputs).last_hidden_state
    counted = batch.attention_mask.clone()
    counted[:, 0] = 0
    return hidden[counted.bool()]


def test_dual_weight_follows_the_error_and_keeps_to_its_bounds():
    weight = DualWeight(allowed=0.05, floor=0.5)
    assert weight.value == 1.0
    weight.update(0.10)
    assert weight.value == pytest.approx(math.exp(0.1))
    weight.update(0.05)
    assert weight.value == pytest.approx(math.exp(0.1)), "as much error as allowed"
    for _ in range(100):
        weight.update(0.0)
    assert weight.value == 0.5
    weight.update(1.0)
    assert 0.5 < weight.value < 1e4
    for _ in range(100):
        weight.update(1.0)
    assert weight.value == 1e4
    weight = DualWeight(allowed=1e-4, floor=0.5)
    weight.update(1.0)
    assert weight.value == 1e4, "of which the exponential overflows"


def test_the_floor_of_the_anchors_weight_keeps_what_is_known(monkeypatch):
    """The wanted stability is so low that the weight always falls: without a floor, ascent on other documents then
    destroys what is to be retained."""
    monkeypatch.setattr(anchor, "RATE", 1.0)  # at the floor within a few steps
    forget, retain = random_batch(seed=1), random_batch(seed=2)
    risen, weights = {}, {}
    for floor in (1.0, 1e-6):
        moe = MoEModel(small_model())
        constraint = Anchored(1e-3, floor)
        constraint.start(moe, [retain])
        optimizer = torch.optim.AdamW(moe.model.parameters(), lr=1e-2)
        handle, losses, weights[floor] = ConstraintHandle(moe, optimizer, constraint), [], []
        for _ in range(40):
            optimizer.zero_grad()
            (-moe.model(**forget.inputs, labels=forget.input_ids).loss).backward()
            with handle.retain():
                losses.append(moe.model(**retain.inputs, labels=retain.labels).loss.item())
            handle.penalty().backward()
            optimizer.step()
            weights[floor].append(constraint.weight.value)
        risen[floor] = losses[-1] / losses[0]
    assert set(weights[1.0]) == {1.0} and weights[1e-6] == sorted(weights[1e-6], reverse=True)
    assert risen[1.0] < 1.6 and risen[1e-6] > 2.5, risen


@pytest.mark.parametrize(
    "axes, expected",
    [
        ({"constraint": "router_l2"}, RouterL2),
        ({"constraint": "gate_anchor"}, GateAnchor),
        ({"constraint": "routing_scores"}, RoutingScores),
        ({"constraint": "anchor"}, Anchored),
        ({"constraint": "frozen"}, FrozenRouter),
    ],
)
def test_rows_of_the_catalogue_make_constraints(axes, expected, moe, batch):
    trace = moe.trace([batch])
    built = build(Method(**axes), trace, trace, bases=None, seed=0)
    assert type(built.constraint) is expected and built.scope is None


class Shrinking(RouterConstraint):
    """A constraint of one's own, which says what it was made with."""

    def __init__(self, share, seed):
        self.share, self.seed, self.kept = share, seed, torch.zeros(3)

    def constrain(self, layer, before_Ed, after_Ed, seen):
        return after_Ed * self.share


def test_a_class_of_ones_own_constrains(moe, batch):
    method = Method(constraint=f"{__name__}:Shrinking", settings={"share": 0.5})
    constraint = build(method, {}, bases=None, seed=7).constraint
    assert (constraint.share, constraint.seed) == (0.5, 7) and held_bytes(constraint) == 12
    before = moe.thetas()
    optimizer = torch.optim.SGD(moe.model.parameters(), lr=0.0)
    with ConstraintHandle(moe, optimizer, constraint):
        moe.model(**batch.inputs, labels=batch.labels).loss.backward()
        optimizer.step()
    assert all(torch.equal(moe.theta(layer), 0.5 * before[layer]) for layer in moe.layers)


class Named(RouterConstraint):
    """A constraint of one's own from its attributes and methods."""

    def __init__(self, **named):
        vars(self).update(named)


class Penalised(Named):
    def penalty(self, marked):
        return self.made


@pytest.mark.parametrize(
    "constraint, message",
    [
        (Penalised(), "Penalised.penalty is never called: name the kinds of passes in `watches`"),
        (Named(collects=True), "Named collects no passes: name their kinds in `watches`"),
        (Named(collects=True, watches=frozenset({"retain"}), every=2), "`every` is 2: set it to 1"),
    ],
)
def test_attributes_that_contradict_methods_are_an_error(constraint, message, moe):
    with pytest.raises(ValueError, match=message):
        ConstraintHandle(moe, torch.optim.SGD(moe.model.parameters(), lr=0.1), constraint)


@pytest.mark.parametrize("made", [None, torch.ones(2)])
def test_a_penalty_is_one_number(made, moe, batch):
    constraint = Penalised(made=made, watches=frozenset({"retain"}))
    with ConstraintHandle(moe, torch.optim.SGD(moe.model.parameters(), lr=0.1), constraint) as handle:
        with pytest.raises(ValueError, match=r"Penalised.penalty returned .*: return a tensor of shape \(\)"):
            penalty_of(handle, batch)


@pytest.mark.parametrize("of_gradient", [False, True])
@pytest.mark.parametrize("made", [lambda after_Ed: None, lambda after_Ed: after_Ed.mean(0), lambda after_Ed: 0.0])
def test_a_router_of_another_shape_is_an_error_and_leaves_the_routers(made, of_gradient, moe, batch):
    """The control: one row would be the router of all experts."""
    before = moe.thetas()
    constraint = Named(
        of_gradient=of_gradient, of_update=not of_gradient, constrain=lambda layer, _, after_Ed, seen: made(after_Ed)
    )
    optimizer = torch.optim.SGD(moe.model.parameters(), lr=0.1)
    with ConstraintHandle(moe, optimizer, constraint):
        moe.model(**batch.inputs, labels=batch.labels).loss.backward()
        with pytest.raises(ValueError, match=r"Named.constrain returned .*: return a tensor of shape \(8, 32\)"):
            optimizer.step()
    assert all(torch.equal(moe.theta(layer), before[layer]) for layer in moe.layers)


@pytest.mark.parametrize(
    "path, settings, message",
    [
        (f"{__name__}:Shrinking", {"shar": 0.5}, "missing a required argument: 'share'|unexpected keyword"),
        (f"{__name__}:Shrinkin", {"share": 0.5}, "has no 'Shrinkin'"),
        ("no_such_file:Shrinking", {}, "is its file on PYTHONPATH"),
        ("torch.nn:Identity", {}, "is no RouterConstraint; derive its class from"),
    ],
)
def test_a_class_that_does_not_constrain_is_an_error(path, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(Method(constraint=path, settings=settings), {}, bases=None, seed=0)


def test_one_expert_is_of_a_layer_that_trains():
    def routing(scores):
        scores = torch.tensor(scores)
        return LayerRouting(torch.zeros(len(scores), 4), scores, scores.topk(1).indices)

    trace, method = (
        {0: routing([[0.0, 1.0]]), 1: routing([[9.0, 0.0]])},
        Method(constraint="none", experts="top_attributed"),
    )
    scopes = [build(method, trace, trace, bases=None, layers=given, seed=0).scope for given in (None, [0, 1], [0])]
    assert scopes == [{1: [0]}, {1: [0]}, {0: [1]}]


def test_the_weight_follows_once_in_a_step_however_many_passes_it_takes(moe, batch):
    """Two passes of one step count as their mean; one without gradients counts for nothing."""
    constraint = Anchored(0.95, floor=0.01)
    handle, optimizer = handled(constraint, moe, batch)
    disturb(moe)
    before = constraint.weight.value
    for _ in range(2):
        (moe.model(**batch.inputs).logits.sum() * 0 + penalty_of(handle, batch)).backward()
    assert constraint.weight.value == before, "it is asked for with the weight of the step before"
    errors = list(constraint._errors)
    with torch.no_grad():
        penalty_of(handle, batch)
    assert len(errors) == 2 and constraint._errors == errors and constraint.observed() == {}
    optimizer.step()
    kept = 1 - sum(errors) / 2
    assert constraint.observed() == {"anchor_weight": before, "batch_routing_stability": kept} and kept < 1
    once = DualWeight(allowed=0.05, floor=0.01)
    once.update(sum(errors) / 2)
    assert constraint.weight.value == pytest.approx(once.value) != before
