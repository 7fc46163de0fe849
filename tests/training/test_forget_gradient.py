"""Baselines against relearning: what each makes of the forget gradient, and that a run resumes."""

import json

import pytest
import torch

from conftest import random_batch, small_model
from gripmoe.config.reading import parse_settings
from gripmoe.config.training import Training
from gripmoe.constraints.base import FrozenRouter, Unconstrained
from gripmoe.data.documents import collate
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import weights_digest
from gripmoe.training.adversary import uphill
from gripmoe.training.forget_gradient import ComponentFilter, WeightDistance, disruption_masked
from gripmoe.training.objectives import GradientDifference, cross_entropy
from training.test_adversary import Asked, experts_of
from training.test_loop import CORPORA, TRAINING, Watched, assert_resumes, run

BASELINES = {
    "sam": {"sharpness_radius": 0.05},
    "repselect": {"dropped_components": 2},
    "mudman": {"disruption_mask": True, "adversary_steps": 1, "adversary_restart": 2},
    "weight_distance": {"distance_weight": 0.5},
}


def changed(**keys):
    return TRAINING.model_copy(update=keys)


def test_uphill_is_the_radius_along_the_gradient_and_raises_the_loss():
    moe, batch = MoEModel(small_model()), random_batch(seed=3)
    experts, frozen = experts_of(moe), moe.theta(0)
    frozen.requires_grad_(False)
    before = [p.detach().clone() for p in experts]
    loss = -cross_entropy(moe, batch)  # of unlearning: its ascent is relearning
    loss.backward()
    gradients = [p.grad.clone() for p in experts]
    length = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    with uphill([frozen, *experts], radius=0.05):
        moved = [p - start for p, start in zip(experts, before, strict=True)]
        for step, gradient in zip(moved, gradients, strict=True):
            torch.testing.assert_close(step, 0.05 * gradient / length, atol=1e-7, rtol=1e-3)
        assert torch.cat([step.flatten() for step in moved]).norm().item() == pytest.approx(0.05, rel=1e-3)
        assert all(p.grad is None for p in experts)
        assert -cross_entropy(moe, batch) > loss
    assert all(torch.equal(p, start) for p, start in zip(experts, before, strict=True))


def test_without_a_gradient_uphill_is_here():
    """Of frozen weights, and of a loss that is flat."""
    weight, frozen = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    weight.grad = torch.zeros(3)
    with uphill([weight, frozen], radius=1.0):
        assert torch.equal(weight, torch.ones(3)) and torch.equal(frozen, torch.ones(3))


@pytest.mark.parametrize("radius", [0.0, 0.05])
def test_the_forget_gradient_is_taken_uphill_and_the_retain_gradient_here(tmp_path, radius):
    """The control: without a radius there is one forget pass, at the weights of the retain pass."""
    _, outcome = run(tmp_path / "state.pt", objective=(asked := Asked()), training=changed(sharpness_radius=radius))
    if not radius:
        assert torch.equal(asked.forget[0], asked.retain[0]) and torch.equal(asked.forget[1], asked.retain[1])
        return
    for step in range(TRAINING.max_steps):
        here, there = asked.forget[2 * step : 2 * step + 2]
        assert torch.equal(here, asked.retain[step]) and not torch.equal(there, here)
    _, plain = run(tmp_path / "plain.pt")
    assert plain.tokens < outcome.tokens < 2 * plain.tokens, "the pass that finds the way counts"


def test_a_way_uphill_that_several_passes_find_is_that_of_one(tmp_path):
    """Of one batch; each of two passes has half of it."""
    whole, _ = run(tmp_path / "whole.pt", training=changed(sharpness_radius=0.05, max_steps=2))
    halves = {"gradient_accumulation": 2, "forget_batch_size": 2, "retain_batch_size": 2}
    accumulated, _ = run(tmp_path / "halves.pt", training=changed(sharpness_radius=0.05, max_steps=2, **halves))
    for one, other in zip(experts_of(whole), experts_of(accumulated), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_the_filter_drops_the_leading_components_alone():
    moe = MoEModel(small_model("qwen2_moe"))
    shared = moe.block(0).shared_expert.up_proj.weight
    experts = experts_of(moe)
    cross_entropy(moe, random_batch(seed=3)).backward()
    before, of_shared = [p.grad.clone() for p in experts], shared.grad.clone()
    ComponentFilter([*experts, shared], count=3)()
    assert torch.equal(shared.grad, of_shared)
    for parameter, gradient in zip(experts, before, strict=True):
        kept, whole = (torch.linalg.svdvals(tensor) for tensor in (parameter.grad, gradient))
        torch.testing.assert_close(kept[:, :-3], whole[:, 3:], atol=1e-6, rtol=1e-3)
        assert (kept[:, -3:] <= 1e-5 * whole[:, :1] + 1e-12).all()
        assert (whole[:, 0] > 1.01 * kept[:, 0]).any(), "there was something to drop"


def test_a_gradient_that_is_not_finite_ends_a_run_of_repselect(tmp_path):
    class Overflows(GradientDifference):
        def forget_loss(self, model, batch):
            return super().forget_loss(model, batch) * float("inf")

    settings = dict(objective=Overflows(alpha=1.0), constraint=Unconstrained())
    moe, outcome = run(tmp_path / "s.pt", training=changed(dropped_components=2), **settings)
    assert (outcome.status, outcome.steps) == ("diverged", 0)
    assert weights_digest(moe.model) == weights_digest(small_model())


def test_lower_precision_than_that_of_the_radius_is_refused(tmp_path):
    """A move that small is lost in bf16. The control: other baselines train there."""
    options = dict(moe=MoEModel(small_model().bfloat16()), constraint=Unconstrained())
    with pytest.raises(ConfigError, match="`sharpness_radius` needs weights in fp32"):
        run(tmp_path / "s.pt", training=changed(**BASELINES["sam"]), **options)
    assert run(tmp_path / "s.pt", training=changed(**BASELINES["repselect"]), **options)[1].steps


def test_components_that_are_all_of_a_matrix_and_models_without_experts_are_refused():
    moe = MoEModel(small_model())
    rank = min(min(p.shape[1:]) for p in experts_of(moe))
    ComponentFilter(experts_of(moe), rank - 1)
    with pytest.raises(ConfigError, match=f"`dropped_components` {rank} leaves nothing"):
        ComponentFilter(experts_of(moe), rank)
    with pytest.raises(ConfigError, match="a dense model has none"):
        ComponentFilter([torch.nn.Parameter(torch.ones(3, 3))], 1)


def test_the_gradient_of_the_distance_is_autograds():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(2, 3, 4, generator=generator)) for _ in range(2)]
    zero, still, untrained = (torch.nn.Parameter(value) for value in (torch.zeros(4), torch.ones(4), torch.ones(4)))
    originals = [weight.detach().clone() for weight in weights]
    distance = WeightDistance([*weights, zero, still, untrained], weight=0.5)
    with torch.no_grad():
        for weight in [*weights, zero]:
            weight.add_(torch.randn(weight.shape, generator=generator))
    for weight in [*weights, zero, still]:
        weight.grad = torch.ones_like(weight)
    relative = sum((w - o).norm() / o.norm() for w, o in zip(weights, originals, strict=True)) / 4
    expected = torch.autograd.grad(-0.5 * relative, weights)
    assert distance()["weight_distance"] == pytest.approx(relative.item(), rel=1e-5)
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, 1 + gradient)
    assert torch.equal(zero.grad, torch.ones(4)) and torch.equal(still.grad, torch.ones(4)) and untrained.grad is None


def test_the_distance_is_rewarded(tmp_path):
    """The more, the farther the model ends from the original; the history says how far."""
    ends = []
    for weight in (1e-9, 5.0):
        training = changed(distance_weight=weight)
        _, outcome = run(tmp_path / f"{weight}.pt", training=training, constraint=FrozenRouter())
        ends.append(outcome.history[-1]["weight_distance"])
    assert ends[1] > 1.1 * ends[0] > 0


def test_elements_that_disrupt_what_is_retained_are_masked():
    """Those whose sign the retain gradient does not share. A weight that the retain loss does not reach stays."""
    weight, other, untrained = (torch.nn.Parameter(torch.zeros(4)) for _ in range(3))
    weight.grad, other.grad = torch.tensor([1.0, 1.0, -2.0, 3.0]), torch.ones(4)
    with disruption_masked([weight, other, untrained]):
        weight.grad = torch.tensor([0.5, -0.5, -0.5, 0.0])
    assert weight.grad.tolist() == [1.5, -0.5, -2.5, 0.0]
    assert other.grad is None and untrained.grad is None


def test_masks_of_several_passes_are_those_of_one(tmp_path):
    """The sign counts of the whole retain gradient, not of a pass."""
    settings = dict(disruption_mask=True, adam_epsilon=1e-3, max_steps=2)
    whole, _ = run(tmp_path / "whole.pt", training=changed(**settings))
    halves = dict(gradient_accumulation=2, forget_batch_size=2, retain_batch_size=2)
    accumulated, _ = run(tmp_path / "halves.pt", training=changed(**settings, **halves))
    for one, other in zip(whole.model.parameters(), accumulated.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_masks_without_a_retain_loss_are_refused():
    settings = TRAINING.model_dump() | {"disruption_mask": True, "objective": {"alpha": 0.0}}
    with pytest.raises(ConfigError, match="`disruption_mask` drops the whole forget gradient"):
        parse_settings(Training, json.dumps(settings))


@pytest.mark.parametrize("mask", [True, False])
def test_a_masked_step_does_not_disrupt_what_is_retained(tmp_path, mask):
    """A forget loss that falls as the retain loss rises decides a step; with the mask the retain loss does."""

    class Opposed(Watched):
        def forget_loss(self, model, _):
            return -cross_entropy(model, collate(CORPORA.retain, 0))

    once = {"max_steps": 1, "check_every": 1, "checkpoint_every": 1, "weight_decay": 0.0}
    training = changed(disruption_mask=mask, betas=(0.0, 0.0), learning_rate=1e-4, alpha_multiplier=1e-3, **once)
    moe, _ = run(tmp_path / "s.pt", training=training, constraint=FrozenRouter(), objective=(asked := Opposed()))
    batch, start = asked.retain[0], MoEModel(small_model())
    before, after = (cross_entropy(each, batch).item() for each in (start, moe))
    assert (after < before) == mask


@pytest.mark.parametrize("name", BASELINES)
def test_a_baselines_run_resumes_in_the_same_bytes(tmp_path, name):
    assert_resumes(tmp_path, changed(**BASELINES[name]))


def test_two_places_for_one_gradient_are_refused():
    settings = TRAINING.model_dump() | {"adversary_steps": 1, "adversary_restart": 2, "sharpness_radius": 0.1}
    with pytest.raises(ConfigError, match="give one of `adversary_steps` and `sharpness_radius`"):
        parse_settings(Training, json.dumps(settings))
