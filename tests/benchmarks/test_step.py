"""What a constraint costs per training step: `pytest tests/benchmarks` (not part of `make test`).

Ratios are medians over pairs of steps of two copies of one model, one constrained and one not, taken in turns in one
process on one thread, so that what else the machine does falls on both sides.
"""

import copy
import statistics
import time

import pytest
import torch

from gripmoe.constraints.base import Unconstrained
from gripmoe.constraints.hooks import ConstraintHandle
from gripmoe.data.documents import Row, collate
from gripmoe.library.constrain import constrain
from gripmoe.moe import MoEModel
from gripmoe.training.optimizers import make_adamw
from gripmoe.worlds.models import make_model

METHODS = (
    "frozen_router", "expert_specific", "full_null_space", "expert_specific_minibatch",
    "expert_specific_paper", "anchored", "seuf",
)  # fmt: skip
PAIRS = 25
SETTLED = 15  # steps before the first pair: constraints bind only where routers have moved


def batches(count: int, rows: int, length: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(3, 700, (rows, length), generator=generator).tolist()
        made.append(collate([Row(str(n), row, row) for n, row in enumerate(ids)], pad_id=0))
    return made


class Loop:
    """One side: a copy of the model, its optimizer, and a handle by `method`, if any."""

    def __init__(self, plain, method, forget, retain, optimizer="adamw", learning_rate=5e-4, **settings):
        self.model = copy.deepcopy(plain).train()
        rest, routers = (
            [p for n, p in self.model.named_parameters() if ("mlp.gate." in n) == r] for r in (False, True)
        )
        groups = [{"params": rest, "lr": learning_rate}, {"params": routers, "lr": 10 * learning_rate}]
        self.optimizer = make_adamw(optimizer, groups, weight_decay=0.0)
        if method:
            self.handle = constrain(self.model, self.optimizer, retain, forget=forget, method=method, **settings)
        else:
            self.handle = ConstraintHandle(MoEModel(self.model), self.optimizer, Unconstrained())

    def step(self, forget, retain) -> float:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        with self.handle.forget():
            loss = -self.model(**forget.inputs, labels=forget.input_ids).loss
        (loss + self.handle.penalty()).backward()
        with self.handle.retain():
            loss = self.model(**retain.inputs, labels=retain.input_ids).loss
        (loss + self.handle.penalty()).backward()
        self.optimizer.step()
        return time.perf_counter() - started


def documents():
    retain = batches(20, rows=10, length=21, seed=0)
    forget, trained = batches(20, rows=16, length=21, seed=1), batches(1, rows=16, length=21, seed=2)[0]
    return forget, [*retain, trained], trained


def compare(benchmark, what, held, free, forget, trained, settled=SETTLED, pairs=PAIRS) -> None:
    """The median ratio of seconds, in pairs of steps once constraints have settled."""
    times = [[side.step(forget[n % len(forget)], trained) for side in (held, free)] for n in range(settled + pairs)]
    ratios = [one / other for one, other in times[settled:]]
    one, other = (1e3 * statistics.median(seconds) for seconds in zip(*times[settled:], strict=True))
    benchmark.extra_info["ratio"] = ratio = round(statistics.median(ratios), 3)
    benchmark.pedantic(held.step, args=(forget[0], trained), rounds=5)
    print(f"\n{what}: {ratio:.3f} ({min(ratios):.2f} to {max(ratios):.2f}), {one:.1f} and {other:.1f} ms")


@pytest.mark.parametrize("method", METHODS)
def test_step_of_the_tiny_model(method, benchmark):
    forget, retain, trained = documents()
    plain = make_model("qwen3_moe", 700, seed=0)
    held, free = Loop(plain, method, forget, retain), Loop(plain, None, forget, retain)
    compare(benchmark, f"{method}, of an unconstrained step", held, free, forget, trained)


@pytest.mark.parametrize("original_answers", ["cached", "forward"])
def test_where_the_anchors_original_answers_come_from(original_answers, benchmark):
    """Kept from before training, or made in every step by a forward pass of the original model, which then stays in
    memory; both against an unconstrained step."""
    forget, retain, trained = documents()
    plain = make_model("qwen3_moe", 700, seed=0)
    original = copy.deepcopy(plain) if original_answers == "forward" else None
    held, free = Loop(plain, "anchored", forget, retain, original=original), Loop(plain, None, forget, retain)
    compare(
        benchmark,
        f"anchored, original answers {original_answers}, of an unconstrained step",
        held,
        free,
        forget,
        trained,
    )
