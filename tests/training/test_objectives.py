"""Losses by hand, their limits, and that a cache says what a second model says."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import gripmoe.training.objectives
from conftest import random_batch, small_model
from gripmoe.data.documents import Row, collate
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.training.objectives import EPSILON, GradientDifference, cross_entropy, make_objective, sequence_logprobs
from moe.test_families import make

SETTINGS = {
    "gd": {"alpha": 1.0},
    "kl": {"alpha": 1.0},
    "unlikelihood": {"alpha": 1.0},
    "npo": {"alpha": 1.0, "beta": 0.1},
    "rmu": {"alpha": 1.0, "layer": 0, "kappa": 2.5},
}


@pytest.fixture
def moe():
    return MoEModel(small_model())


@pytest.fixture
def partly_scored():
    ids = [5, 9, 12, 7]
    return collate([Row("a", ids, [-100, -100, 12, 7]), Row("b", [5, 9], [-100, 9])], pad_id=0)


def started(name, moe, batch, **settings):
    objective = make_objective(name, {**SETTINGS[name], **settings}, seed=0)
    objective.start(moe, [batch], [batch])
    return objective


def moved(moe, seed=1):
    """The model after some training: another one of the same shape, near it."""
    other = MoEModel(copy.deepcopy(moe.model))
    torch.manual_seed(seed)
    with torch.no_grad():
        for layer in other.layers:
            for parameter in other.block(layer).parameters():
                parameter += 0.05 * torch.randn_like(parameter)
    return other


def logprobs_of(moe, ids):
    with torch.no_grad():
        return moe.model(input_ids=torch.tensor([ids])).logits.log_softmax(-1)[0]


def test_unlikelihood_by_hand_and_at_a_certain_token(moe, partly_scored):
    long, short = logprobs_of(moe, [5, 9, 12, 7]), logprobs_of(moe, [5, 9])
    by_hand = -sum(torch.log(1 + EPSILON - each.exp()) for each in (long[1, 12], long[2, 7], short[0, 9])) / 3
    objective = started("unlikelihood", moe, partly_scored)
    assert objective.forget_loss(moe, partly_scored).item() == pytest.approx(by_hand.item(), rel=1e-5)
    with torch.no_grad():
        moe.model.lm_head.weight *= 1e3  # each token is certain, or impossible
    loss = objective.forget_loss(moe, partly_scored)
    loss.backward()
    gradient = moe.expert_parameters(0)[0].grad
    assert loss.isfinite() and gradient.isfinite().all()


def test_cross_entropy_counts_scored_tokens_only(moe, partly_scored):
    long, short = logprobs_of(moe, [5, 9, 12, 7]), logprobs_of(moe, [5, 9])
    by_hand = -(long[1, 12] + long[2, 7] + short[0, 9]) / 3
    assert cross_entropy(moe, partly_scored).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_gradient_difference_ascends_and_descends(moe, batch):
    objective = started("gd", moe, batch, alpha=2.0)
    assert objective.alpha == 2.0
    assert objective.forget_loss(moe, batch).item() == -objective.retain_loss(moe, batch).item()


def test_divergence_by_hand_and_zero_at_the_start(moe, partly_scored):
    objective = started("kl", moe, partly_scored)
    assert objective.retain_loss(moe, partly_scored).item() == pytest.approx(0, abs=1e-6)
    after = moved(moe)
    by_hand = 0.0
    for ids, positions in (([5, 9, 12, 7], (1, 2)), ([5, 9], (0,))):
        before_V, after_V = logprobs_of(moe, ids), logprobs_of(after, ids)
        by_hand += sum((before_V[p].exp() * (before_V[p] - after_V[p])).sum().item() for p in positions)
    assert by_hand > 1e-3
    assert objective.retain_loss(after, partly_scored).item() == pytest.approx(by_hand / 3, rel=1e-4)


def test_divergence_in_chunks_has_the_same_value_and_gradient(moe, batch, monkeypatch):
    objective, after = started("kl", moe, batch), moved(moe)
    results = []
    for size in (1024, 5):
        monkeypatch.setattr(gripmoe.training.objectives, "TOKENS_PER_CHUNK", size)
        after.model.zero_grad()
        loss = objective.retain_loss(after, batch)
        loss.backward()
        results.append((loss.item(), after.theta(0).grad.clone()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-7)


def test_npo_by_hand(moe, partly_scored):
    objective, after = started("npo", moe, partly_scored, beta=0.5), moved(moe)
    by_hand = 0.0
    for ids, scored in (([5, 9, 12, 7], ((1, 12), (2, 7))), ([5, 9], ((0, 9),))):
        before_V, after_V = logprobs_of(moe, ids), logprobs_of(after, ids)
        ratio = sum((after_V[p, token] - before_V[p, token]).item() for p, token in scored)
        by_hand += -2 / 0.5 * math.log(1 / (1 + math.exp(0.5 * ratio)))
    assert objective.forget_loss(after, partly_scored).item() == pytest.approx(by_hand / 2, rel=1e-5)


def test_npo_with_a_small_beta_is_gradient_ascent(moe, batch):
    """At beta -> 0 the gradient is that of the summed log-likelihood; at beta 1 it is not."""
    after = moved(moe)
    gradients = {}
    for beta in (1e-6, 1.0):
        after.model.zero_grad()
        started("npo", moe, batch, beta=beta).forget_loss(after, batch).backward()
        gradients[beta] = after.theta(0).grad.flatten().clone()
    after.model.zero_grad()
    sequence_logprobs(after, batch).mean().backward()
    ascent = after.theta(0).grad.flatten()
    torch.testing.assert_close(gradients[1e-6], ascent, rtol=1e-3, atol=1e-6)
    assert F.cosine_similarity(gradients[1.0], ascent, dim=0) < 0.999


def test_npo_says_when_its_gradient_dies(moe, batch):
    objective = started("npo", moe, batch)
    objective.forget_loss(moe, batch)
    assert objective.monitor["npo_weight"] == pytest.approx(1.0, abs=1e-4)
    with torch.no_grad():
        moe.model.lm_head.weight.copy_(torch.randn_like(moe.model.lm_head.weight) * 30)
    objective.forget_loss(moe, batch)
    assert objective.monitor["npo_weight"] < 0.1


def test_steering_vector_is_scaled_positive_and_fixed_per_run(moe, batch):
    targets = []
    for seed in (3, 3, 4):
        objective = make_objective("rmu", {"alpha": 1.0, "layer": 0, "steering": 6.5}, seed)
        objective.start(moe, [batch], [batch])
        targets.append(objective.target_d)
    assert targets[0].norm().item() == pytest.approx(6.5)
    assert (targets[0] >= 0).all() and torch.equal(targets[0], targets[1])
    assert not torch.equal(targets[0], targets[2])


def test_rmu_by_hand_and_its_retain_term_is_zero_at_the_start(moe):
    batch = random_batch(rows=2)
    objective = started("rmu", moe, batch)
    assert objective.retain_loss(moe, batch).item() == 0.0
    with torch.no_grad():
        hidden = moe.model(**batch.inputs, output_hidden_states=True).hidden_states[1]
    squared = (hidden - objective.target_d).square().mean(dim=-1)
    by_hand = squared[batch.attention_mask.bool()].mean()
    assert objective.forget_loss(moe, batch).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_rmu_names_the_layers_of_the_model(moe):
    with pytest.raises(ConfigError, match="rmu: `layer` 7: the model has layers 0 to"):
        started("rmu", moe, random_batch(), layer=7)


def test_rmu_differs_from_other_code_where_the_module_says(moe):
    """From a mean over all positions (wmdp) by padding; from one over documents (open-unlearning) by their lengths, by
    prompts and by first tokens."""

    def steered(hidden, mask):
        return (hidden - objective.target_d).square().mean(dim=-1)[mask]

    ids = list(range(3, 15))
    alike = collate([Row("a", ids, [-100, *ids[1:]]), Row("b", ids[::-1], [-100, *ids[-2::-1]])], 0)
    unlike = collate([Row("a", ids, [-100] * 8 + ids[8:]), Row("b", ids[:4], [-100, *ids[1:4]])], 0)
    objective = started("rmu", moe, alike)
    for batch, same in ((alike, True), (unlike, False)):
        with torch.no_grad():
            hidden = moe.model(**batch.inputs, output_hidden_states=True).hidden_states[1]
        ours = objective.forget_loss(moe, batch).item()
        everywhere = steered(hidden, torch.ones_like(batch.attention_mask).bool()).mean().item()
        assert (ours == pytest.approx(everywhere, rel=1e-5)) == same
        scored = [steered(row, labels != -100).mean() for row, labels in zip(hidden, batch.labels, strict=True)]
        assert ours != pytest.approx(torch.stack(scored).mean().item(), rel=1e-5)


def test_rmu_gives_no_gradient_above_its_layer(moe, batch):
    started("rmu", moe, batch).forget_loss(moe, batch).backward()
    assert moe.theta(0).grad.norm() > 0 and moe.theta(1).grad is None


def test_kappa_follows_the_models_own_scale(moe, batch):
    with torch.no_grad():
        hidden = moe.model(**batch.inputs, output_hidden_states=True).hidden_states[1]
    mean_length = hidden.norm(dim=-1)[batch.attention_mask.bool()].mean().item()
    objective = started("rmu", moe, batch)
    assert objective.target_d.norm().item() == pytest.approx(2.5 * mean_length, rel=1e-4)
    assert objective.monitor["steering"] == pytest.approx(objective.target_d.norm().item())


def divergence_of_two(objective, second, after, batch):
    scored = batch.attention_mask[:, 1:].bool()
    before, now = (moe.model(**batch.inputs).logits[:, :-1].log_softmax(-1)[scored] for moe in (second, after))
    return (before.exp() * (before - now)).sum(-1).mean()


def preference_of_two(objective, second, after, batch):
    ratio = sequence_logprobs(after, batch) - sequence_logprobs(second, batch)
    return -2 / objective.beta * F.logsigmoid(-objective.beta * ratio).mean()


def distance_of_two(objective, second, after, batch):
    """(tokens,) of RMU's layer, squared and averaged over d."""
    now, before = (moe.model(**batch.inputs, output_hidden_states=True).hidden_states[1] for moe in (after, second))
    return (now - before).square().mean(-1)[batch.attention_mask.bool()].mean()


@pytest.mark.parametrize("family", ["hy_v4", "qwen4_exp_text"])
def test_layers_of_several_streams_are_refused_by_rmu(family):
    moe = make(family)
    with pytest.raises(ConfigError, match="returns several streams of states.*take another objective"):
        started("rmu", moe, random_batch())


LOSSES_OF_TWO_MODELS = {
    "kl": ("retain_loss", divergence_of_two),
    "npo": ("forget_loss", preference_of_two),
    "rmu": ("retain_loss", distance_of_two),
}


def test_what_asks_the_original_model_is_known():
    started = {name: type(make_objective(name, settings, seed=0)).start for name, settings in SETTINGS.items()}
    cached = {name for name, start in started.items() if start is not GradientDifference.start}
    assert cached == set(LOSSES_OF_TWO_MODELS)


@pytest.mark.parametrize("name", LOSSES_OF_TWO_MODELS)
def test_a_cache_is_as_good_as_a_second_model(name, moe):
    """Documents are cached in other batches, with other padding, than those in which they are asked for."""
    rows = [Row(str(n), ids := list(range(3, 9 + n)), ids) for n in range(4)]
    batch = collate(rows, 0)
    cached = make_objective(name, SETTINGS[name], seed=0)
    cached.start(moe, [collate(rows[:1], 0), collate(rows[1:], 0)], [collate(rows[::-1], 0)])
    second, after = MoEModel(copy.deepcopy(moe.model)), moved(moe)
    loss, of_second = LOSSES_OF_TWO_MODELS[name]
    found = getattr(cached, loss)(after, batch).item()
    assert found == pytest.approx(of_second(cached, second, after, batch).item(), rel=1e-5)
    assert abs(found) > 1e-4 and found != pytest.approx(getattr(cached, loss)(moe, batch).item(), rel=1e-3)


def test_npo_tells_documents_of_the_same_tokens_apart_by_what_is_scored(moe):
    """A question whose answer alone counts, beside the same tokens read as a plain document."""
    ids = list(range(3, 23))
    alike = [Row("answer", ids, [-100] * 19 + ids[19:]), Row("plain", ids, ids)]
    batches = [collate(rows, 0) for rows in (alike[:1], alike[1:], alike)]
    objective = make_objective("npo", SETTINGS["npo"], seed=0)
    objective.start(moe, batches[:2], [])
    for batch in batches:
        objective.forget_loss(moe, batch)
        assert objective.monitor["npo_weight"] == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(KeyError, match="other"):
        objective.forget_loss(moe, collate([Row("other", ids, [-100] * 10 + ids[10:])], 0))


class Mistaken(GradientDifference):
    def __init__(self):
        self.alpha = 1 + "1"


class NotOne:
    def __init__(self, alpha):
        self.alpha = alpha


def test_a_class_that_is_no_objective_is_named():
    with pytest.raises(ConfigError, match="NotOne' has no 'monitor', 'last_layer', 'start', .*; derive its class from"):
        make_objective(f"{__name__}:NotOne", {"alpha": 1.0}, 0)


def test_mistakes_in_names_and_settings():
    with pytest.raises(ValueError, match="unknown objective 'magic'; one of gd, kl, npo, rmu"):
        make_objective("magic", {}, 0)
    with pytest.raises(ValueError, match="objective 'npo'.*beta"):
        make_objective("npo", {"alpha": 1.0}, 0)
    with pytest.raises(TypeError, match="unsupported operand") as raised:
        make_objective(f"{__name__}:Mistaken", {}, 0)
    assert raised.traceback[-1].name == "__init__", "a mistake of the class is not one of its settings"
    with pytest.raises(ValueError, match="one of `kappa`"):
        make_objective("rmu", {"alpha": 1.0, "layer": 0}, 0)
