"""Tokens a second of whole training loops, side by side: `pytest -s tests/benchmarks/test_whole_loops.py`.

Each loop trains the shipped model by gradient difference, on the same batches of its world and with the same settings.
The loops run in threads of which one runs at a time, and take turns of a few steps. Times are those of the processor.
OPEN_UNLEARNING names a checkout of open-unlearning, or its trainer is not compared. docs/cost.md holds the results.
"""

import os
import statistics
import sys
import threading
import time
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from gripmoe import tiny_model, trainer_callback
from gripmoe.config.methods import method_table
from gripmoe.config.training import Training
from gripmoe.constraints.build import build
from gripmoe.constraints.null_space import fit_bases
from gripmoe.data.corpora import Corpora, epoch_rows, in_batches, load_corpus
from gripmoe.data.documents import collate
from gripmoe.evaluation.stop_rule import StopRule
from gripmoe.io.files import write_jsonl
from gripmoe.moe import MoEModel
from gripmoe.training.loop import unlearn
from gripmoe.training.objectives import GradientDifference
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import make_world

METHODS = "expert_specific", "expert_specific_paper", "anchored"
ROWS = 16  # of a batch
RETAIN_DOCUMENTS = 200  # whose routing is constrained, as in the world `tiny`
TURN = 2  # steps
SETTLED = 5  # turns before the first that counts: constraints bind only where routers have moved
TURNS = 36
STEPS = TURN * (SETTLED + TURNS)
RATE = 5e-4
TRAINING = Training(
    learning_rate=RATE, router_multiplier=1.0, betas=(0.9, 0.999), adam_epsilon=1e-8, weight_decay=0.0,
    router_weight_decay=0.0, clip_norm=1.0, forget_batch_size=ROWS, retain_batch_size=ROWS, max_steps=STEPS,
    check_every=TURN, checkpoint_every=STEPS, loss_bound=1e4,
)  # fmt: skip


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder, files, (_, tokenizer) = tmp_path_factory.mktemp("corpora"), wmdp_files(make_world(0), 0), tiny_model()
    rows = {}
    for kind, limit in (("forget", None), ("retain", RETAIN_DOCUMENTS)):
        write_jsonl(folder / f"{kind}.jsonl", files[f"{kind}_corpus"])
        rows[kind] = load_corpus(folder / f"{kind}.jsonl", tokenizer, 256, limit)
    return Corpora(**rows, pad_id=tokenizer.pad_token_id)


class Side:
    """A loop in a thread of its own, `train(model, pause)`, which runs up to its next `pause()` in each turn."""

    def __init__(self, train):
        self.model = tiny_model()[0]
        self._go, self._paused, self._error = threading.Semaphore(0), threading.Semaphore(0), None
        threading.Thread(target=self._run, args=(train,), daemon=True).start()

    def turn(self) -> float:
        """Seconds of the processor."""
        started = time.process_time()
        self._go.release()
        self._paused.acquire()
        if self._error:
            raise self._error
        return time.process_time() - started

    def _run(self, train) -> None:
        self._go.acquire()
        try:
            train(self.model, self._pause)
        except BaseException as error:
            self._error = error
        self._paused.release()

    def _pause(self) -> None:
        self._paused.release()
        self._go.acquire()


def ours(corpora, method, folder):
    """The loop of the workflow, whose stop rule marks the turns."""

    def train(model, pause):
        row, moe = method_table()[method], MoEModel(model)
        trace = moe.trace([batch.inputs for batch in in_batches(corpora.retain, corpora.pad_id)])
        built = build(row, trace, bases=lambda constrained: fit_bases(constrained, moe.rules(), row), seed=0)
        stop = StopRule({"never": -1.0}, lambda _: pause() or {"never": 0.0})
        state = folder / f"{method}.pt"
        unlearn(moe, GradientDifference(1.0), built.constraint, corpora, TRAINING, stop, seed=0, state_file=state)

    return train


class Plain(Trainer):
    """Gradient difference as one overrides `compute_loss`; under a constraint the passes are marked."""

    constraint = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        handle = self.constraint.handle if self.constraint else None
        forget_loss = -model(**inputs["forget"]).loss
        with handle.retain() if handle else nullcontext():
            retain_loss = model(**inputs["retain"]).loss
        return forget_loss + retain_loss + (handle.penalty() if handle else 0)


class Turns(TrainerCallback):
    """Pauses where our loop does."""

    def __init__(self, pause):
        self.pause = pause

    def on_train_begin(self, *_, **__):
        self.pause()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % TURN == 0:
            self.pause()


def trainer(corpora, method, folder, kind=Plain):
    """A Trainer of the blocks that our loop trains, on its batches."""
    steps = [[epoch_rows(getattr(corpora, part), ROWS, 0, n) for part in ("forget", "retain")] for n in range(STEPS)]
    pairs = [{"forget": forget, "retain": retain} for rows in steps for forget, retain in zip(*rows, strict=True)]

    def collated(pairs):
        batches = {part: collate([pair[part] for pair in pairs], corpora.pad_id) for part in ("forget", "retain")}
        return {part: batch.inputs | {"labels": batch.labels} for part, batch in batches.items()}

    arguments = TrainingArguments(
        str(folder / "trainer"), max_steps=STEPS, learning_rate=RATE, weight_decay=0.0, lr_scheduler_type="constant",
        max_grad_norm=1.0, per_device_train_batch_size=ROWS, train_sampling_strategy="sequential", use_cpu=True,
        dataloader_pin_memory=False, remove_unused_columns=False, report_to=[], save_strategy="no",
    )  # fmt: skip

    def train(model, pause):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".mlp." in name)
        made = kind(model=model, args=arguments, train_dataset=pairs, data_collator=collated)
        if method != "unconstrained":
            made.constraint = trainer_callback(in_batches(corpora.retain, corpora.pad_id), method=method)
            made.add_callback(made.constraint)
        made.add_callback(Turns(pause))
        made.train()

    return train


def open_unlearning(corpora, method, folder):
    """Its own trainer of gradient difference, from the checkout."""
    package = types.ModuleType("trainer")  # its own one imports every trainer, and what those need
    package.__path__ = [str(Path(os.environ["OPEN_UNLEARNING"]) / "src" / "trainer")]
    sys.modules["trainer"] = package
    from trainer.unlearn.grad_diff import GradDiff

    class OfTransformers5(GradDiff):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs)

    return trainer(corpora, method, folder, OfTransformers5)


def take_turns(benchmark, corpora, loops, check=lambda sides: None) -> None:
    """Tokens a second of each loop, and its time over that of the first one; the median turn, and the range."""
    sides = {name: Side(train) for name, train in loops.items()}
    for _ in range(1 + SETTLED):  # the first turn ends before the first step
        for side in sides.values():
            side.turn()
    check(sides)
    seconds = [{name: side.turn() for name, side in sides.items()} for _ in range(TURNS)]
    rows = [epoch_rows(part, ROWS, 0, n) for n in range(STEPS) for part in (corpora.forget, corpora.retain)]
    tokens = TURN / STEPS * sum(len(row.ids) for batch in rows for row in batch)
    first = next(iter(sides))
    for name, side in sides.items():
        side.turn()  # to its end
        ratios = [turn[name] / turn[first] for turn in seconds]
        ratio, speed = statistics.median(ratios), tokens / statistics.median(turn[name] for turn in seconds)
        benchmark.extra_info[name] = {"tokens_per_second": round(speed), "time_ratio": round(ratio, 3)}
        spread = f"{ratio:.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"\n{name}: {speed:.0f} tokens a second, time over {first} {spread}", end="")
    print()
    benchmark.pedantic(lambda: None)


def trains_alike(sides) -> None:
    """Each loop has moved the routers as the first one has, up to rounding."""
    original = MoEModel(tiny_model()[0]).thetas()
    first, *others = (
        torch.stack([theta - original[layer] for layer, theta in MoEModel(side.model).thetas().items()])
        for side in sides.values()
    )
    for other in others:
        assert (other - first).norm() < 0.05 * first.norm()


def test_loops_without_a_constraint(corpora, benchmark, tmp_path):
    loops = {"ours": ours, "trainer": trainer}
    if "OPEN_UNLEARNING" in os.environ:
        loops["open_unlearning"] = open_unlearning
    made = {name: loop(corpora, "unconstrained", tmp_path) for name, loop in loops.items()}
    take_turns(benchmark, corpora, made, trains_alike)


@pytest.mark.parametrize("loop", [ours, trainer])
@pytest.mark.parametrize("method", METHODS)
def test_constraint_in_a_loop(method, loop, corpora, benchmark, tmp_path):
    take_turns(benchmark, corpora, {name: loop(corpora, name, tmp_path) for name in ("unconstrained", method)})
