"""Unlearning under attack: where the forget gradient is taken, what the adversary keeps, and that a run resumes."""

import json
from dataclasses import replace

import pytest
import torch

from conftest import random_batch, small_model
from gripmoe.config.reading import parse_settings
from gripmoe.config.training import Training
from gripmoe.constraints.base import Unconstrained
from gripmoe.constraints.hooks import Diverged
from gripmoe.data.corpora import Corpora
from gripmoe.data.documents import Row
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import weights_digest
from gripmoe.training import steps
from gripmoe.training.adversary import RelearningAdversary
from gripmoe.training.loop import unlearn
from gripmoe.training.objectives import GradientDifference, cross_entropy
from gripmoe.training.step_batches import StepBatches
from training.test_loop import NEVER, TRAINING, assert_resumes, run

ATTACKED = TRAINING.model_copy(update={"adversary_steps": 2, "adversary_restart": 2})


def experts_of(moe):
    return [p for layer in moe.layers for p in moe.expert_parameters(layer)]


def test_a_step_of_the_adversary_by_hand():
    moe = MoEModel(small_model())
    experts, batch = experts_of(moe), random_batch(seed=3)
    before = [p.detach().clone() for p in experts]
    gradients = torch.autograd.grad(cross_entropy(moe, batch), experts)
    adversary = RelearningAdversary(experts, rate=0.01)
    adversary.restart()
    with adversary.weights():
        first = adversary.relearn(lambda: cross_entropy(moe, batch))
        for parameter, start, gradient in zip(experts, before, gradients, strict=True):
            expected = start - 0.01 * gradient.sign()
            assert torch.equal(parameter, expected)
            assert not torch.equal(parameter, start)
        assert adversary.relearn(lambda: cross_entropy(moe, batch)) < first
    assert all(torch.equal(parameter, start) for parameter, start in zip(experts, before, strict=True))


def test_what_would_train_the_model_or_nothing_is_refused():
    moe, batch = MoEModel(small_model()), random_batch(seed=3)
    for parameters, rate, said in (
        ([], 0.01, "`parameters` are the weights"),
        (moe.model, 0.01, "`parameters` are the weights"),
        (moe.model.named_parameters(), 0.01, r"give `model.parameters\(\)`"),
        (experts_of(moe), -0.01, "`rate` is -0.01"),
        (experts_of(moe), "0.01", "`rate` is '0.01'"),
    ):
        with pytest.raises(ValueError, match=said):
            RelearningAdversary(parameters, rate)
    before, adversary = weights_digest(moe.model), RelearningAdversary(experts_of(moe), 0.01)
    adversary.restart()
    with adversary.weights(), pytest.raises(ValueError, match="`loss_of` returns NoneType"):
        adversary.relearn(lambda: None)
    with adversary.weights(), pytest.raises(Diverged, match="the loss is nan"):
        adversary.relearn(lambda: cross_entropy(moe, batch) * torch.nan)
    for some in (experts_of(moe), moe.model.parameters()):  # as PEFT leaves them, and where nothing trains
        for parameter in some:
            parameter.requires_grad_(False)
        with adversary.weights(), pytest.raises(ValueError, match="no parameter of the adversary has a gradient"):
            adversary.relearn(lambda: cross_entropy(moe, batch))
    with adversary.weights(), pytest.raises(RuntimeError, match="call `restart` before that block"):
        adversary.restart()
    with pytest.raises(RuntimeError, match="outside `weights` this would train the model itself"):
        adversary.relearn(lambda: cross_entropy(moe, batch))
    assert weights_digest(moe.model) == before


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimizer_that_would_be_undone_is_refused(fused):
    """The control steps after the block."""
    moe, batch = MoEModel(small_model()), random_batch(seed=3)
    optimizer = torch.optim.AdamW(moe.model.parameters(), lr=0.1, fused=fused)
    adversary = RelearningAdversary(experts_of(moe), rate=0.01)
    adversary.restart()
    with pytest.raises(RuntimeError, match="a step within `weights` would be undone"), adversary.weights():
        adversary.relearn(lambda: cross_entropy(moe, batch))
        (-cross_entropy(moe, batch)).backward()
        optimizer.step()
    before = [p.detach().clone() for p in experts_of(moe)]
    with adversary.weights():
        adversary.relearn(lambda: cross_entropy(moe, batch))
        (-cross_entropy(moe, batch)).backward()
    optimizer.step()
    assert not any(map(torch.equal, before, experts_of(moe)))
    with adversary.weights():  # of another model, an optimizer may step
        torch.optim.AdamW(small_model().parameters(), lr=0.1).step()


def test_small_steps_of_the_adversary_add_up_in_bf16():
    """Also from one visit to the next. The control: a single step moves few weights."""
    moe, batch = MoEModel(small_model().bfloat16()), random_batch(seed=3)
    experts = experts_of(moe)
    before = [p.detach().clone() for p in experts]
    adversary = RelearningAdversary(experts, rate=1e-5)
    adversary.restart()
    moved, losses = [], []
    for _ in range(20):
        with adversary.weights():
            losses.append(adversary.relearn(lambda: cross_entropy(moe, batch)))
            changed = [(p != start).float().mean().item() for p, start in zip(experts, before, strict=True)]
            moved.append(sum(changed) / len(changed))
        assert all(map(torch.equal, experts, before))
    assert moved[0] < 0.1 < 0.5 < moved[-1] and losses[-1] < losses[0]


def test_relearning_leaves_the_gradients_of_earlier_passes():
    moe = MoEModel(small_model())
    experts, batch = experts_of(moe), random_batch(seed=3)
    cross_entropy(moe, batch).backward()
    everything = list(moe.model.parameters())  # the loop trains attention and embeddings too
    assert len(everything) > len(experts) and all(p.grad.any() for p in everything if p.grad is not None)
    before = [None if p.grad is None else p.grad.clone() for p in everything]
    adversary = RelearningAdversary(experts, rate=0.01)
    adversary.restart()
    with adversary.weights():
        adversary.relearn(lambda: cross_entropy(moe, batch))
    for parameter, gradient in zip(everything, before, strict=True):
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)
    moe.model.zero_grad()
    with adversary.weights():
        adversary.relearn(lambda: cross_entropy(moe, batch))
    assert all(p.grad is None for p in everything)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("out of memory")


def test_relearning_that_fails_leaves_the_gradients_of_earlier_passes():
    moe, batch = MoEModel(small_model()), random_batch(seed=3)
    cross_entropy(moe, batch).backward()
    before = [parameter.grad for parameter in moe.model.parameters()]
    adversary = RelearningAdversary(experts_of(moe), rate=0.01)
    adversary.restart()
    with adversary.weights(), pytest.raises(RuntimeError, match="out of memory"):
        adversary.relearn(lambda: Fails.apply(cross_entropy(moe, batch)))
    assert all(parameter.grad is kept for parameter, kept in zip(moe.model.parameters(), before, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_hides_parameters_is_refused(reentrant):
    """Their gradients would be those of relearning afterwards."""
    moe, batch = MoEModel(small_model()), random_batch(seed=3)
    moe.model.activation_checkpointing_enable({"use_reentrant": reentrant})
    moe.model.enable_input_require_grads()
    moe.model.train()
    adversary = RelearningAdversary(experts_of(moe), rate=0.01)
    adversary.restart()
    with adversary.weights():
        if reentrant:
            with pytest.raises(RuntimeError, match="reentrant gradient checkpointing hides"):
                adversary.relearn(lambda: cross_entropy(moe, batch))
        else:
            adversary.relearn(lambda: cross_entropy(moe, batch))
    assert all(parameter.grad is None for parameter in moe.model.parameters())


class Asked(GradientDifference):
    """Gradient difference that keeps the first expert weights of every pass."""

    def __init__(self):
        super().__init__(alpha=1.0)
        self.forget, self.retain = [], []

    def forget_loss(self, model, batch):
        self.forget.append(experts_of(model)[0].detach().clone())
        return super().forget_loss(model, batch)

    def retain_loss(self, model, batch):
        self.retain.append(experts_of(model)[0].detach().clone())
        return super().retain_loss(model, batch)


@pytest.mark.parametrize("training", [TRAINING, ATTACKED], ids=["alone", "attacked"])
def test_the_forget_loss_is_asked_of_the_adversary_and_the_retain_loss_of_the_model(tmp_path, training):
    """The control: without an adversary both losses see the same weights."""
    _, outcome = run(tmp_path / "state.pt", objective=(asked := Asked()), training=training)
    steps = training.max_steps
    same = [torch.equal(*pair) for pair in zip(asked.forget[:steps], asked.retain[:steps], strict=True)]
    assert all(same) if training is TRAINING else not any(same)
    assert ("adversary_loss" in outcome.history[-1]) == (training is ATTACKED)


def test_its_loss_is_the_mean_over_the_tokens_that_it_sees(tmp_path):
    """Of one pass of several, which has another number of tokens than their mean."""
    rows = [Row(str(n), ids := [3 + n] * length, ids) for n, length in enumerate((4, 20, 6, 30))]
    halves = {"gradient_accumulation": 2, "forget_batch_size": 2, "retain_batch_size": 2}
    settings = {"max_steps": 1, "check_every": 1, "adversary_steps": 1, "learning_rate": 1e-12}
    moe, training = MoEModel(small_model()), TRAINING.model_copy(update=halves | settings)
    corpora = Corpora(rows, rows, pad_id=0)
    batch = StepBatches(corpora, training, 5 + steps.ADVERSARY_SEED, moe.model.device).of("forget", 0)
    alone = cross_entropy(moe, replace(batch, scored_per_pass=None)).item()
    assert abs(cross_entropy(moe, batch).item() / alone - 1) > 0.1, "the control"
    made = GradientDifference(1.0), Unconstrained()
    outcome = unlearn(moe, *made, corpora, training, NEVER, seed=5, state_file=tmp_path / "s.pt")
    assert outcome.history[-1]["adversary_loss"] == pytest.approx(alone, rel=1e-4)


def test_the_adversary_goes_on_from_its_own_weights_until_it_restarts(tmp_path):
    """Within two steps of a restart the adversary is nearer to the model than later."""
    far = TRAINING.model_copy(update={"adversary_steps": 1, "adversary_restart": 6, "checkpoint_every": 6})
    run(tmp_path / "state.pt", objective=(asked := Asked()), training=far)
    pairs = zip(asked.forget[: far.max_steps], asked.retain[: far.max_steps], strict=True)
    distance = [(forget - retain).norm().item() for forget, retain in pairs]
    assert distance[0] < distance[5] > distance[6] < distance[11]


def test_an_attacked_run_resumes_in_the_same_bytes(tmp_path):
    assert_resumes(tmp_path, ATTACKED)


def test_a_restart_between_checkpoints_is_refused():
    settings = TRAINING.model_dump() | {"adversary_steps": 1, "adversary_restart": 5}
    with pytest.raises(ConfigError, match="adversary_restart"):
        parse_settings(Training, json.dumps(settings))
