"""Losses by hand."""

import math

import pytest
import torch

from conftest import random_batch, small_model
from gripmoe.data.documents import Row, collate
from gripmoe.moe import MoEModel
from gripmoe.objectives import GradientDifference, RepresentationMisdirection, cross_entropy, make_objective


def test_cross_entropy_counts_scored_tokens_only():
    moe = MoEModel(small_model())
    ids = [5, 9, 12, 7]
    batch = collate([Row("a", ids, [-100, -100, 12, 7]), Row("b", [5, 9], [-100, 9])], pad_id=0)
    with torch.no_grad():
        logprobs = moe.model(input_ids=torch.tensor([ids])).logits.log_softmax(-1)[0]
        short = moe.model(input_ids=torch.tensor([[5, 9]])).logits.log_softmax(-1)[0]
    by_hand = -(logprobs[1, 12] + logprobs[2, 7] + short[0, 9]) / 3
    assert cross_entropy(moe, batch).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_gradient_difference_ascends_and_descends(batch):
    moe = MoEModel(small_model())
    objective = GradientDifference(alpha=2.0)
    assert objective.alpha == 2.0
    assert objective.forget_loss(moe, None, batch).item() == -objective.retain_loss(moe, None, batch).item()


def test_steering_vector_is_scaled_positive_and_fixed_per_run():
    one, same, other = (
        RepresentationMisdirection(32, layer=0, steering=6.5, alpha=1.0, seed=seed) for seed in (3, 3, 4)
    )
    assert one.target_d.norm().item() == pytest.approx(6.5)
    assert (one.target_d >= 0).all() and torch.equal(one.target_d, same.target_d)
    assert not torch.equal(one.target_d, other.target_d)


def test_rmu_by_hand_and_its_retain_term_is_zero_at_the_start():
    moe, reference = MoEModel(small_model()), MoEModel(small_model())
    objective = RepresentationMisdirection(32, layer=0, steering=2.0, alpha=1.0, seed=0)
    batch = random_batch(rows=2)
    assert objective.retain_loss(moe, reference, batch).item() == 0.0
    with torch.no_grad():
        hidden = moe.model(**batch.inputs, output_hidden_states=True).hidden_states[1]
    squared = (hidden - objective.target_d).square().mean(dim=-1)
    by_hand = squared[batch.attention_mask.bool()].mean()
    assert objective.forget_loss(moe, reference, batch).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_rmu_gives_no_gradient_above_its_layer(batch):
    moe = MoEModel(small_model())
    objective = RepresentationMisdirection(32, layer=0, steering=2.0, alpha=1.0, seed=0)
    objective.forget_loss(moe, moe, batch).backward()
    assert moe.theta(0).grad.norm() > 0 and moe.theta(1).grad is None


def test_unknown_objective():
    with pytest.raises(ValueError, match="unknown objective 'magic'"):
        make_objective("magic", {}, MoEModel(small_model()), random_batch(), 0)


def test_names_make_the_objectives():
    moe = MoEModel(small_model())
    assert isinstance(make_objective("gd", {"alpha": 1.0}, moe, random_batch(), 0), GradientDifference)
    rmu = make_objective("rmu", {"layer": 1, "steering": 3.0, "alpha": 2.0}, moe, random_batch(), 0)
    assert rmu.layer == 1 and math.isclose(rmu.target_d.norm().item(), 3.0, rel_tol=1e-5)


def test_kappa_follows_the_models_own_scale(batch):
    moe = MoEModel(small_model())
    with torch.no_grad():
        hidden = moe.model(**batch.inputs, output_hidden_states=True).hidden_states[1]
    mean_length = hidden.norm(dim=-1)[batch.attention_mask.bool()].mean().item()
    rmu = make_objective("rmu", {"layer": 0, "kappa": 2.5, "alpha": 1.0}, moe, batch, 0)
    assert math.isclose(rmu.target_d.norm().item(), 2.5 * mean_length, rel_tol=1e-4)
