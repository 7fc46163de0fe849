"""Routing-aware retain weights: what they match, what they do where nothing can be matched, how losses use them."""

import pytest
import torch

from conftest import random_batch, small_model
from gripmoe.moe import MoEModel
from gripmoe.training.objectives import cross_entropy, token_logprobs
from gripmoe.training.token_weights import matching_weights, routing_aware_weights


def test_weights_match_the_wanted_shares_and_stay_near_uniform():
    generator = torch.Generator().manual_seed(0)
    active_NS = (torch.rand(500, 4, generator=generator) < torch.tensor([0.1, 0.2, 0.5, 0.3])).double()
    wanted_S = torch.tensor([0.3, 0.2, 0.4, 0.6]).double()
    weights_N = matching_weights(active_NS, wanted_S, ridge=1e-9)
    assert (weights_N > 0).all() and weights_N.mean().item() == pytest.approx(1)
    shares_S = (weights_N[:, None] * active_NS).mean(0)
    torch.testing.assert_close(shares_S, wanted_S, atol=1e-6, rtol=0)
    assert not torch.allclose(active_NS.mean(0), wanted_S, atol=0.05), "the control: uniform weights do not"
    same_N = matching_weights(active_NS, active_NS.mean(0))
    torch.testing.assert_close(same_N, torch.ones_like(same_N))


def test_what_cannot_be_matched_is_approached():
    active_NS = torch.zeros(50, 2).double()
    active_NS[:5, 0] = 1  # nobody is active for the second
    weights_N = matching_weights(active_NS, torch.tensor([0.9, 0.5]).double())
    share = (weights_N * active_NS[:, 0]).mean().item()
    assert weights_N.isfinite().all() and 0.8 < share < 0.9


def test_retain_tokens_weigh_as_the_forget_critical_experts_need():
    """With one set of tokens on either side nothing is to be changed; with others, the shares meet."""
    model = MoEModel(small_model())
    forget, retain = [random_batch(rows=6, seed=0)], [random_batch(rows=6, seed=1), random_batch(rows=5, seed=2)]
    same = routing_aware_weights(model, forget, forget, 1).of(**forget[0].inputs)
    mask = forget[0].attention_mask.bool()
    torch.testing.assert_close(same[mask], torch.ones_like(same[mask]))
    assert (same[~mask] == 0).all()

    weights = routing_aware_weights(model, forget, retain, 1)

    def shares(batches, weights=None):
        total, mass = torch.zeros(2, 8), 0.0
        for batch in batches:
            mask = batch.attention_mask.bool()
            of = mask.float() if weights is None else weights.of(**batch.inputs)
            for number, sets in enumerate(model.routes(**batch.inputs).values()):
                hot = torch.zeros(len(sets), 8).scatter_(1, sets, 1)
                total[number] += (hot * of.flatten()[:, None]).sum(0)
            mass += of.sum().item()
        return total / mass

    wanted, plain = shares(forget), shares(retain)
    critical = (wanted - plain).argmax(dim=1)
    layers = torch.arange(2)
    before = (wanted - plain)[layers, critical].abs()
    after = (wanted - shares(retain, weights))[layers, critical].abs()
    assert (after < 0.2 * before).all() and (before > 0.02).all()


def test_a_weighted_mean_by_hand():
    model, batch = MoEModel(small_model()), random_batch()
    plain = cross_entropy(model, batch)
    batch.weights = 2 * batch.attention_mask.float()
    torch.testing.assert_close(cross_entropy(model, batch), plain)
    batch.weights = torch.zeros_like(batch.weights)
    batch.weights[1, 4] = 3.0
    torch.testing.assert_close(cross_entropy(model, batch), -token_logprobs(model, batch)[1, 4])
