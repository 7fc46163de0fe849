"""The loop: the stop rule, and a killed run that ends in the same bytes as an uninterrupted one."""

import json
import math
import multiprocessing
import os
import signal
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from conftest import METHODS, random_batch, small_model
from gripmoe.attacks.relearning import relearning
from gripmoe.config.methods import method_table
from gripmoe.config.training import Relearning, Training
from gripmoe.constraints.anchor import Anchored
from gripmoe.constraints.base import Unconstrained
from gripmoe.constraints.build import build
from gripmoe.constraints.hooks import ConstraintHandle
from gripmoe.constraints.null_space import NullSpacePaper, fit_bases
from gripmoe.data.corpora import Corpora, epoch_rows, in_batches
from gripmoe.data.documents import Row
from gripmoe.evaluation.stop_rule import StopRule
from gripmoe.geometry.routing import mean_stability, route, stability_by_layer
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import weights_digest
from gripmoe.training import steps
from gripmoe.training.loop import _corrected, unlearn
from gripmoe.training.objectives import GradientDifference, RepresentationMisdirection, make_objective
from gripmoe.training.step_batches import StepBatches

TRAINING = Training(
    learning_rate=1e-3,
    router_multiplier=5.0,
    betas=(0.9, 0.999),
    adam_epsilon=1e-8,
    weight_decay=0.01,
    router_weight_decay=0.01,
    clip_norm=1.0,
    forget_batch_size=4,
    retain_batch_size=4,
    max_steps=12,
    check_every=2,
    checkpoint_every=2,
    loss_bound=1e4,
)


def corpus(seed, rows=10, shortest=8):
    generator = torch.Generator().manual_seed(seed)
    lengths = [8 - number % (9 - shortest) for number in range(rows)]
    documents = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]
    return [Row(f"{seed}/{i}", ids, ids) for i, ids in enumerate(documents)]


CORPORA = Corpora(corpus(0), corpus(1), pad_id=0)
PAPER = METHODS["expert_specific_paper"].model_copy(update={"kaczmarz_tolerance": 0.0})
NEVER = StopRule({"accuracy": -1.0}, lambda _: {"accuracy": 1.0})


def run(
    state_file,
    *,
    training=TRAINING,
    target=-1.0,
    accuracy=None,
    correct=None,
    constraint=None,
    objective=None,
    seed=5,
    moe=None,
    **more,
):
    """A run with the constraint that has a random generator, so that resuming must restore that too."""
    moe = moe or MoEModel(small_model())
    outcome = unlearn(
        moe,
        objective or GradientDifference(alpha=1.0),
        constraint or NullSpacePaper(PAPER, seed=3),
        CORPORA,
        training,
        StopRule(
            {"forget_accuracy": target},
            lambda m: {"forget_accuracy": (accuracy or (lambda m: m.theta(0).sum().item()))(m)},
        ),
        seed=seed,
        correct=correct,
        state_file=state_file,
        **more,
    )
    return moe, outcome


class Watched(GradientDifference):
    """Gradient difference that keeps the retain batches that it saw."""

    def __init__(self):
        super().__init__(alpha=1.0)
        self.retain = []

    def retain_loss(self, model, batch):
        self.retain.append(batch)
        return super().retain_loss(model, batch)


def without_seconds(history):
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in history]


def assert_resumes(tmp_path, training):
    """An interrupted run ends in the bytes of a whole one. The control: a run with TRAINING ends in others."""
    whole, expected = run(tmp_path / "whole.pt", training=training)
    checks = iter(range(4))
    with pytest.raises(StopIteration):
        run(tmp_path / "state.pt", training=training, accuracy=lambda moe: float(next(checks)))
    resumed, outcome = run(tmp_path / "state.pt", training=training)
    assert weights_digest(resumed.model) == weights_digest(whole.model)
    assert without_seconds(outcome.history)[-1] == without_seconds(expected.history)[-1]
    plain, _ = run(tmp_path / "plain.pt")
    assert weights_digest(plain.model) != weights_digest(whole.model)


def test_runs_of_every_seed_store_the_same_documents_in_the_same_order():
    """If their steps draw the same ones, so that what the original model says of them is stored once."""

    def stored(seed):
        batches = StepBatches(CORPORA, TRAINING.model_copy(update={"max_steps": 50}), seed, torch.device("cpu"))
        return [batch.row_ids for batch in batches.used("retain")], batches.of("retain", 0).row_ids

    (first, drawn), (second, others) = map(stored, (0, 1))
    assert first == second and sorted(sum(first, [])) == sorted(row.id for row in CORPORA.retain) and drawn != others


def test_training_computes_no_padding(tmp_path, monkeypatch):
    """Neither unlearning nor the attack that finetunes; the control pads."""
    computed = []
    forward = Qwen3MoeSparseMoeBlock.forward
    counting = lambda block, x: computed.append(x.shape[0] * x.shape[1]) or forward(block, x)  # noqa: E731
    monkeypatch.setattr(Qwen3MoeSparseMoeBlock, "forward", counting)
    unequal = Corpora(corpus(0, shortest=5), corpus(1, shortest=5), pad_id=0)
    drawn = [StepBatches(unequal, TRAINING, 5, torch.device("cpu")).of(kind, 0) for kind in ("forget", "retain")]
    forget, retain = (int(batch.attention_mask.sum()) for batch in drawn)
    once = TRAINING.model_copy(update={"max_steps": 1})
    moe, state = MoEModel(small_model()), tmp_path / "state.pt"
    unlearn(moe, GradientDifference(1.0), Unconstrained(), unequal, once, NEVER, seed=5, state_file=state)
    assert computed[:4] == [forget, forget, retain, retain], "both layers"
    computed.clear()
    settings = Relearning(learning_rate=1e-3, batch_size=4)
    relearning(moe, unequal.forget, lambda _: [], settings, checks=(0, 1), seed=5)
    assert computed == [forget, forget]
    computed.clear()
    moe.model(**drawn[0].inputs)
    assert computed == [drawn[0].input_ids.numel()] * 2 and computed[0] > forget


@pytest.mark.parametrize("constraint", [None, "anchor"])
def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path, constraint, monkeypatch):
    """Not the constraint either, whose penalty is on what routers see in the passes that are computed twice."""
    passes = []
    forward = Qwen3MoeSparseMoeBlock.forward
    monkeypatch.setattr(Qwen3MoeSparseMoeBlock, "forward", lambda *args: passes.append(1) or forward(*args))
    digests, histories, counts = [], [], []
    for again in (False, True):
        chosen = Anchored(routing_stability=0.9, floor=1.0) if constraint else None
        training = TRAINING.model_copy(update={"gradient_checkpointing": again})
        moe, outcome = run(tmp_path / f"{again}.pt", training=training, constraint=chosen)
        counts.append(len(passes))
        passes.clear()
        digests.append(weights_digest(moe.model))
        histories.append(without_seconds(outcome.history))
    assert digests[0] == digests[1] and histories[0] == histories[1]
    assert counts[1] > 1.4 * counts[0], "blocks are computed again"


@pytest.mark.parametrize("constraint, passes_per_step", [(Unconstrained(), (1, 1)), (None, (1, 2))])
def test_layers_after_the_one_that_a_loss_looks_at_do_not_run(tmp_path, constraint, passes_per_step, monkeypatch):
    """And nothing else changes. A constraint that looks at the retain pass sees all of its layers."""
    training = TRAINING.model_copy(update={"loss_bound": 1e9, "check_every": TRAINING.max_steps})
    monkeypatch.setattr(steps, "TIMED_PAIRS", 0)
    passes = []
    forward = Qwen3MoeSparseMoeBlock.forward
    monkeypatch.setattr(Qwen3MoeSparseMoeBlock, "forward", lambda *args: passes.append(1) or forward(*args))
    digests, counts = [], []
    for shorter in (True, False):
        if not shorter:
            monkeypatch.setattr(MoEModel, "only_layers", lambda self, count: nullcontext())
        rmu = RepresentationMisdirection(layer=0, alpha=1.0, kappa=2.0, seed=0)
        moe, _ = run(tmp_path / f"{shorter}.pt", training=training, constraint=constraint, objective=rmu)
        digests.append(weights_digest(moe.model))
        counts.append(len(passes))
        passes.clear()
    saved = counts[1] - counts[0]
    in_training = training.max_steps * (4 - sum(passes_per_step))
    assert digests[0] == digests[1] and in_training <= saved <= in_training + 2, "and one or two in the references"
    assert digests[0] != weights_digest(small_model()), "the control: it trained"


def _run_until_killed(state_file, step):
    calls = 0

    def accuracy(moe):
        nonlocal calls
        calls += 1
        if calls * TRAINING.check_every > step:
            os.kill(os.getpid(), signal.SIGKILL)
        return moe.theta(0).sum().item()

    torch.set_num_threads(1)
    run(state_file, accuracy=accuracy)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.nightly), 7])
def test_killed_and_resumed_run_ends_in_the_same_bytes(tmp_path, step):
    whole, expected = run(tmp_path / "whole.pt")
    process = multiprocessing.get_context("spawn").Process(target=_run_until_killed, args=(tmp_path / "state.pt", step))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resumed, outcome = run(tmp_path / "state.pt")
    assert weights_digest(resumed.model) == weights_digest(whole.model)
    assert without_seconds(outcome.history) == without_seconds(expected.history)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_a_step_draws_at_random_is_the_same_when_resumed(tmp_path, dropout, monkeypatch):
    """The control: with dropout it is another run."""

    original = small_model

    def noisy():
        model = original()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
        return model

    plain, _ = run(tmp_path / "plain.pt")
    monkeypatch.setitem(globals(), "small_model", noisy)
    whole, _ = run(tmp_path / "whole.pt")
    calls = iter(range(4))
    with pytest.raises(StopIteration):
        run(tmp_path / "state.pt", accuracy=lambda moe: float(next(calls)))
    torch.manual_seed(0)
    resumed, _ = run(tmp_path / "state.pt")
    assert weights_digest(resumed.model) == weights_digest(whole.model)
    assert (weights_digest(plain.model) == weights_digest(whole.model)) == (dropout == 0)


def test_another_seed_is_another_run(tmp_path):
    """The control: the comparison of bytes above can fail."""
    first, _ = run(tmp_path / "a.pt")
    second, _ = run(tmp_path / "b.pt", seed=6)
    assert weights_digest(first.model) != weights_digest(second.model)


def test_stops_at_the_first_check_that_reaches_the_target(tmp_path):
    values = iter([0.9, 0.5, 0.26, 0.1])
    _, outcome = run(tmp_path / "s.pt", target=0.27, accuracy=lambda m: next(values))
    assert (outcome.status, outcome.steps) == ("reached", 4)
    assert [row["step"] for row in outcome.history] == [0, 2, 4]
    assert {"forget_loss", "retain_loss", "router_gradient", "expert_gradient"} <= outcome.history[-1].keys()


def test_a_plateau_is_marked_and_divergence_ends_the_run(tmp_path, capsys):
    _, outcome = run(tmp_path / "s.pt", target=0.27, accuracy=lambda m: 0.33)
    assert (outcome.status, outcome.steps) == ("not_reached", 12)
    assert "diverged" not in capsys.readouterr().err
    bounded = TRAINING.model_copy(update={"loss_bound": 1e-3})
    _, outcome = run(tmp_path / "t.pt", training=bounded)
    assert (outcome.status, outcome.steps) == ("diverged", 0)
    assert "diverged at step 0: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong, said",
    [
        (1.0, "is a float; return a tensor"),
        (torch.zeros(2, requires_grad=True), r"has shape \(2,\); return one number"),
        (torch.tensor(1.0), "has no graph; compute it from the model's outputs"),
    ],
)
def test_what_is_no_loss_is_named(tmp_path, wrong, said):
    objective = GradientDifference(alpha=1.0)
    objective.forget_loss = lambda *_: wrong
    with pytest.raises(ConfigError, match=f"objective GradientDifference: the forget loss {said}"):
        run(tmp_path / "s.pt", objective=objective)


class Observing(Unconstrained):
    """A constraint of one's own that observes under a `name`, and loads only what it has kept."""

    def __init__(self, name="steps_seen"):
        self.name, self.count = name, torch.tensor(0)

    def after_step(self):
        self.count += 1

    def observed(self):
        return {self.name: self.count}

    def state(self):
        return {"count": self.count}

    def load_state(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("name", ["forget_accuracy", "step", "forget_loss", "seconds"])
def test_a_constraint_observes_under_names_of_its_own(tmp_path, name):
    """Or it would say when a run has forgotten."""
    with pytest.raises(ValueError, match=f"`observed` of the constraint has '{name}', which the history has"):
        run(tmp_path / "s.pt", constraint=Observing(name))
    _, outcome = run(tmp_path / "t.pt", constraint=Observing())
    assert all(type(entry["steps_seen"]) is float for entry in outcome.history[1:])


class Broken(GradientDifference):
    """A forget loss that is no number, with a gradient that is one (`loss`), or the other way round (`gradient`)."""

    def __init__(self, what):
        super().__init__(alpha=1.0)
        self.what = what

    def forget_loss(self, model, batch):
        loss = super().forget_loss(model, batch)
        if self.what == "loss":
            return loss + math.nan
        zero = (model.theta(0) - model.theta(0).detach()).abs().sum()
        return loss + zero.sqrt()  # 0, whose gradient is infinite times 0


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_no_number_ends_the_run_before_it_changes_a_weight(tmp_path, what):
    moe, outcome = run(tmp_path / "s.pt", objective=Broken(what), constraint=Unconstrained())
    assert (outcome.status, outcome.steps) == ("diverged", 0)
    assert weights_digest(moe.model) == weights_digest(small_model())


class NoNumber(Unconstrained):
    """A penalty, or a router, that is no number."""

    def __init__(self, what):
        self.what, self.watches = what, frozenset({"retain"})

    def penalty(self, seen):
        return seen.hidden_Nd.sum() * (math.nan if self.what == "penalty" else 0.0)

    def constrain(self, layer, before_Ed, after_Ed, seen):
        return after_Ed * math.nan if self.what == "router" else after_Ed


@pytest.mark.parametrize("what", ["penalty", "router"])
def test_what_the_handle_calls_diverged_ends_the_run_with_routers_as_they_were(what, tmp_path):
    moe, outcome = run(tmp_path / "s.pt", constraint=NoNumber(what))
    assert (outcome.status, outcome.steps, outcome.seconds) == ("diverged", 0, None)
    assert all(torch.equal(moe.theta(layer), MoEModel(small_model()).theta(layer)) for layer in moe.layers)


ARMS = {
    "null space": {},
    "unconstrained": {"constraint": Unconstrained()},
    "anchored": {"constraint": Anchored(routing_stability=0.9, floor=1.0)},
    "replayed": {"constraint": Unconstrained(), "replay": True},
    "one expert": {"constraint": Unconstrained(), "scope": {0: [1]}},
}


def test_every_method_sees_the_same_retain_documents_in_the_same_order(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "TIMED_PAIRS", 0)
    training, seen = TRAINING.model_copy(update={"max_steps": 4}), {}
    for name, arm in (ARMS | {"another seed": ARMS["unconstrained"] | {"seed": 6}}).items():
        watched = Watched()
        run(tmp_path / f"{name}.pt", training=training, objective=watched, **arm)
        seen[name] = [batch.row_ids for batch in watched.retain]
    control = seen.pop("another seed")
    assert all(order == seen["unconstrained"] for order in seen.values()), seen
    assert len(control) == 4 and control != seen["unconstrained"]


def test_only_expert_blocks_and_routers_train(tmp_path):
    before = small_model().state_dict()
    moe, _ = run(tmp_path / "s.pt", constraint=Unconstrained())
    changed = {name for name, tensor in moe.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and all(".mlp." in name for name in changed)
    assert any(name.endswith("gate.weight") for name in changed)


RMU_AT_0 = RepresentationMisdirection(layer=0, alpha=1.0, kappa=2.0, seed=0)


@pytest.mark.parametrize("objective, trained", [(None, {1}), (RMU_AT_0, {0})])
def test_only_the_last_layers_that_the_losses_look_at_train(tmp_path, objective, trained):
    start = dict(small_model().named_parameters())
    for count, wanted in ((1, trained), (None, {0, 1} if objective is None else {0})):
        training = TRAINING.model_copy(
            update={"trained_layers": count, "weight_decay": 0.0, "router_weight_decay": 0.0}
        )
        moe, _ = run(tmp_path / f"{count}.pt", training=training, constraint=Unconstrained(), objective=objective)
        moved = {name for name, value in moe.model.named_parameters() if not torch.equal(value, start[name])}
        assert {int(name.split(".")[2]) for name in moved} == wanted
        assert any("gate.weight" in name for name in moved)
    too_many = TRAINING.model_copy(update={"trained_layers": 3 if objective is None else 2})
    with pytest.raises(ConfigError, match=r"`trained_layers` is \d, and the losses look at \d MoE layers: lower it"):
        run(tmp_path / "many.pt", training=too_many, objective=objective)


def test_the_end_is_corrected_as_the_checks_are(tmp_path):
    """From passes without padding."""
    computed = []

    def correct(moe):
        router = moe.router(0).register_forward_hook(lambda _, args, __: computed.append(len(args[0])))
        with torch.no_grad(), router:
            moe.model.model(**random_batch().inputs)

    run(tmp_path / "state.pt", correct=correct)
    assert len(computed) > 1 and set(computed) == {int(random_batch().attention_mask.sum())}


def test_the_check_sees_corrected_routers_and_training_does_not(tmp_path):
    """ptc_matched: the stop rule looks at a corrected copy; the trajectory is that of the uncorrected run."""
    original = MoEModel(small_model()).thetas()
    seen = []

    def accuracy(moe):
        seen.append(torch.equal(moe.theta(0), original[0]))
        return 1.0

    restore = lambda moe: moe.set_thetas(original)  # noqa: E731
    corrected, _ = run(tmp_path / "a.pt", accuracy=accuracy, correct=restore, constraint=Unconstrained())
    plain, _ = run(tmp_path / "b.pt", accuracy=lambda m: 1.0, constraint=Unconstrained())
    assert all(seen)
    assert torch.equal(corrected.theta(0), original[0]) and not torch.equal(plain.theta(0), original[0])
    plain.set_thetas(original)
    assert weights_digest(corrected.model) == weights_digest(plain.model)


def test_a_correction_that_fails_leaves_the_routers_as_they_train():
    moe = MoEModel(small_model())
    before = moe.thetas()

    def fail(moe):
        moe.set_thetas({layer: 2 * theta for layer, theta in before.items()})
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), _corrected(moe, fail):
        pass
    assert all(torch.equal(theta, before[layer]) for layer, theta in moe.thetas().items())


def test_every_document_once_per_epoch():
    rows = corpus(0)
    epoch = [row.id for step in range(5) for row in epoch_rows(rows, 2, seed=1, step=step)]
    assert sorted(epoch) == sorted(row.id for row in rows)
    assert epoch != [row.id for step in range(5, 10) for row in epoch_rows(rows, 2, seed=1, step=step)]
    with pytest.raises(ValueError, match="batch size 11 exceeds the 10 documents"):
        epoch_rows(rows, 11, seed=1, step=0)


def test_batches_that_cannot_be_drawn_are_refused(monkeypatch, tmp_path):
    training = TRAINING.model_copy(update={"retain_batch_size": 11})
    with pytest.raises(ValueError, match="retain_batch_size 11 in 1 process of 1 pass exceeds the 10 documents"):
        run(tmp_path / "state.pt", training=training)
    monkeypatch.setattr(distributed, "processes", lambda: 3)
    with pytest.raises(ValueError, match="forget_batch_size 4 in 3 processes of 1 pass exceeds the 10 documents"):
        run(tmp_path / "state.pt")


@pytest.mark.parametrize("method", ["unconstrained", "full_null_space_paper", "router_l2"])
def test_accumulated_passes_are_one_step_of_all_their_documents(method, tmp_path, capsys):
    """The control draws half."""
    ends = {}
    for size, passes in ((4, 1), (2, 2), (2, 1)):
        sizes = {"forget_batch_size": size, "retain_batch_size": size, "gradient_accumulation": passes}
        moe = MoEModel(small_model())
        built = build(method_table()[method], moe.trace([random_batch()]), bases=lambda trace: {}, seed=0)
        training = TRAINING.model_copy(update=sizes | {"max_steps": 4})
        outcome = unlearn(
            moe,
            GradientDifference(alpha=1.0),
            built.constraint,
            Corpora(corpus(0, shortest=3), corpus(1, shortest=3), pad_id=0),
            training,
            NEVER,
            seed=5,
            state_file=tmp_path / "s",
        )
        assert outcome.documents == {"forget": size * passes, "retain": size * passes}
        assert f"{size * passes} forget and {size * passes} retain documents a step" in capsys.readouterr().err
        ends[size, passes] = moe.theta(0).detach()
    torch.testing.assert_close(ends[2, 2], ends[4, 1], atol=1e-5, rtol=1e-4)
    assert (ends[2, 1] - ends[4, 1]).abs().max() > 1e-3, "the control"


@pytest.mark.parametrize("name", ["gd", "kl", "npo", "rmu", "unlikelihood"])
@pytest.mark.parametrize("kind", ["forget", "retain"])
def test_each_token_of_a_step_weighs_the_same_in_every_pass(name, kind):
    """Passes of few and of many tokens. The control averages the means of passes."""
    settings = {"rmu": {"layer": 1, "kappa": 5.0}, "npo": {"beta": 0.1}}
    moe = MoEModel(small_model())
    objective = make_objective(name, {"alpha": 1.0, **settings.get(name, {})}, seed=0)
    rows = [Row(str(n), ids := [3 + n] * length, [-100] * (length // 2) + ids[length // 2 :])
            for n, length in enumerate((4, 20, 6, 30))]  # fmt: skip
    losses, controls = {}, {}
    for passes in (1, 2):
        sizes = {"gradient_accumulation": passes, "forget_batch_size": 4 // passes, "retain_batch_size": 4 // passes}
        batches = StepBatches(Corpora(rows, rows, pad_id=0), TRAINING.model_copy(update=sizes), 0, torch.device("cpu"))
        if passes == 1:
            objective.start(moe, batches.used("forget"), batches.used("retain"))
            with torch.no_grad():
                moe.theta(0).add_(torch.randn_like(moe.theta(0)))  # or retain losses of rmu and kl are zero
        loss, of_passes = getattr(objective, f"{kind}_loss"), [batches.of(kind, 0, number) for number in range(passes)]
        losses[passes] = torch.stack([loss(moe, batch) for batch in of_passes]).mean()
        alone = [replace(batch, scored_per_pass=None, tokens_per_pass=None) for batch in of_passes]
        controls[passes] = torch.stack([loss(moe, batch) for batch in alone]).mean()
    torch.testing.assert_close(losses[2], losses[1])
    assert losses[1].abs() > 1e-5
    if name != "npo":  # a mean over documents
        assert (controls[2] - losses[1]).abs() > 1e-3 * losses[1].abs(), "the control"


class Monitored(GradientDifference):
    """An objective of one's own, which monitors a tensor and a number of numpy."""

    def forget_loss(self, model, batch):
        loss = super().forget_loss(model, batch)
        self.monitor = {"own_tensor": loss.detach(), "own_number": np.float64(0.5)}
        return loss


def test_what_an_objective_monitors_is_kept_as_plain_numbers(tmp_path):
    """Else the history could not be written, nor a state be read."""
    _, outcome = run(tmp_path / "state.pt", objective=Monitored(alpha=1.0))
    row = json.loads(json.dumps(outcome.history))[-1]
    assert row["own_tensor"] == pytest.approx(row["forget_loss"]) and row["own_number"] == 0.5
    assert {type(value) for value in outcome.history[-1].values()} <= {float, int}


def test_replay_and_recomputed_activations_go_together(tmp_path):
    """What is computed again in the backward pass is forced to the same sets."""
    ends = []
    for recomputed in (False, True):
        moe = MoEModel(small_model())
        training = TRAINING.model_copy(update={"gradient_checkpointing": recomputed, "max_steps": 4})
        unlearn(
            moe, GradientDifference(alpha=1.0), Unconstrained(), CORPORA, training, NEVER, seed=5, replay=True,
            state_file=tmp_path / f"{recomputed}.pt",
        )  # fmt: skip
        ends.append(moe.model.state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], msg=name)


def test_experts_train_in_fp8_and_are_asked_in_their_own_precision(tmp_path):
    """It is another run, near the first, and the checks of the stop rule see the model as it is."""
    asked, digests, ends = set(), [], []
    for precision in ("native", "fp8_emulated"):
        training = TRAINING.model_copy(update={"expert_precision": precision, "max_steps": 4})
        moe, outcome = run(
            tmp_path / f"{precision}.pt",
            training=training,
            accuracy=lambda m: asked.add(m.model.config._experts_implementation) or 1.0,
        )
        digests.append(weights_digest(moe.model))
        ends.append(outcome.history[-1]["retain_loss"])
    assert digests[0] != digests[1] and ends[0] == pytest.approx(ends[1], rel=1e-2)
    assert asked == {small_model().config._experts_implementation}


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fp32", "adamw_8bit"])
def test_timing_a_step_changes_no_bit(tmp_path, optimizer, monkeypatch):
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao")
    training = TRAINING.model_copy(update={"optimizer": optimizer, "max_steps": 4})
    digests = set()
    for pairs in (1, 3):
        monkeypatch.setattr(steps, "TIMED_PAIRS", pairs)
        model, outcome = run(tmp_path / f"{pairs}.pt", training=training)
        digests.add(weights_digest(model.model))
        assert all(seconds > 0 for seconds in outcome.seconds)
    assert len(digests) == 1


def seldom_projected(every):
    """Sound Method A on the retain documents, and what their original routing is."""
    moe, row = MoEModel(small_model()), METHODS["expert_specific"].model_copy(update={"every": every})
    trace = moe.trace([batch.inputs for batch in in_batches(CORPORA.retain, CORPORA.pad_id)])
    return build(row, trace, bases=lambda seen: fit_bases(seen, moe.rules(), row), seed=0).constraint, trace


def kept_by_routers(trace, moe):
    moved = {layer: route(r.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, r in trace.items()}
    return mean_stability(stability_by_layer(trace, moved))


def test_what_is_checked_saved_and_returned_is_feasible(tmp_path, monkeypatch):
    """Between projections routers wait. The control: the same checks, where nothing settles them."""
    training, found = TRAINING.model_copy(update={"learning_rate": 0.05, "max_steps": 8, "check_every": 2}), {}
    for settles in (True, False):
        constraint, trace = seldom_projected(every=5)
        if not settles:
            monkeypatch.setattr(ConstraintHandle, "settle", lambda handle: None)
        kept = []
        accuracy = lambda moe, kept=kept, trace=trace: kept.append(kept_by_routers(trace, moe)) or 1.0  # noqa: E731
        moe, _ = run(tmp_path / f"{settles}.pt", training=training, constraint=constraint, accuracy=accuracy)
        found[settles] = [*kept, kept_by_routers(trace, moe)]
    assert set(found[True]) == {1.0} and min(found[False][1:]) < 1.0 == found[False][0]


def test_a_projection_counts_by_how_often_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(steps.Steps, "_seconds", lambda each: 1.0 if each.handle.is_lifted else 3.0)
    ratios = [
        run(tmp_path / f"{every}.pt", constraint=seldom_projected(every)[0])[1].costs["time_ratio"] for every in (1, 4)
    ]
    assert ratios == [3.0, 1.5]


def test_a_step_that_would_diverge_is_not_timed(tmp_path):
    class Bursts(GradientDifference):
        """When training has ended, which its stop rule says."""

        over = False

        def retain_loss(self, model, batch):
            return super().retain_loss(model, batch) * (math.inf if self.over else 1.0)

    def accuracy(moe):
        objective.over = True
        return -2.0

    objective = Bursts(alpha=1.0)
    moe, outcome = run(tmp_path / "state.pt", objective=objective, accuracy=accuracy)
    assert outcome.status == "reached" and outcome.seconds is None
    assert all(tensor.isfinite().all() for tensor in moe.model.state_dict().values())


def test_a_step_is_timed_against_one_without_the_constraint(tmp_path, monkeypatch):
    """By a clock that only the constraint moves, once in each of two layers."""
    clock = [0]

    class Slow(Unconstrained):
        def constrain(self, layer, before_Ed, after_Ed, seen):
            clock[0] += 1
            return after_Ed

    monkeypatch.setattr(steps, "now", lambda: clock[0])
    assert run(tmp_path / "state.pt", constraint=Slow())[1].seconds == (2, 0)


class Sparing(Unconstrained):
    """Observes every second step alone, as a method that projects at some steps does."""

    steps = 0

    def observed(self):
        self.steps += 1
        return {} if self.steps % 2 else {"seen": 3.0}


def test_means_of_the_history_are_over_the_steps_that_were_observed(tmp_path):
    _, outcome = run(tmp_path / "state.pt", constraint=Sparing())
    rows = [row for row in outcome.history if "seen" in row]
    assert len(rows) == 6 and {row["seen"] for row in rows} == {3.0}
    assert all(math.isfinite(row["forget_loss"]) for row in rows)
