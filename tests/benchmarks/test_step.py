"""What a constraint costs per training step: `pytest tests/benchmarks` (not part of `make test`).

Ratios are medians over pairs of steps of two copies of one model, one constrained and one not, taken in turns in one
process on one thread, so that what else the machine does falls on both sides.
"""

import copy
import statistics
import time

import pytest
import torch

from gripmoe.adapter import METHODS, constrain
from gripmoe.constraints import Unconstrained
from gripmoe.data.documents import Row, collate
from gripmoe.guard import RouterGuard
from gripmoe.moe import MoEModel
from gripmoe.worlds.models import make_model

PAIRS = 25
SETTLED = 15  # steps before the first pair: constraints bind only where routers have moved


def batches(count: int, rows: int, length: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(3, 700, (rows, length), generator=generator).tolist()
        made.append(collate([Row(str(n), row, row) for n, row in enumerate(ids)], pad_id=0))
    return made


def one_step(model, optimizer, guard, forget, retain) -> float:
    started = time.perf_counter()
    optimizer.zero_grad()
    with guard.forget():
        loss = -model(**forget.inputs, labels=forget.input_ids).loss
    loss.backward()
    with guard.retain():
        loss = model(**retain.inputs, labels=retain.input_ids).loss
    (loss + guard.penalty()).backward()
    optimizer.step()
    return time.perf_counter() - started


@pytest.mark.parametrize("method", METHODS)
def test_step_of_the_tiny_model(method, benchmark):
    torch.set_num_threads(1)
    retain = batches(20, rows=10, length=21, seed=0)
    forget, trained = batches(20, rows=16, length=21, seed=1), batches(1, rows=16, length=21, seed=2)[0]
    sides = []
    plain = make_model("qwen3_moe", 700, seed=0)
    for constrained in (False, True):
        model = copy.deepcopy(plain).train()
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for n, p in model.named_parameters() if "mlp.gate" not in n], "lr": 5e-4},
                {"params": [p for n, p in model.named_parameters() if "mlp.gate" in n], "lr": 5e-3},
            ],
            weight_decay=0.0,
        )
        if constrained:
            guard = constrain(model, optimizer, retain=[*retain, trained], method=method)
        else:
            guard = RouterGuard(MoEModel(model), optimizer, Unconstrained())
        sides.append((model, optimizer, guard))
    ratios = []
    for step in range(SETTLED + PAIRS):
        times = [one_step(*side, forget[step % len(forget)], trained) for side in sides]
        if step >= SETTLED:
            ratios.append(times[1] / times[0])
    benchmark.extra_info["ratio"] = round(statistics.median(ratios), 3)
    benchmark.pedantic(one_step, args=(*sides[1], forget[0], trained), rounds=5)
    print(f"\n{method}: {benchmark.extra_info['ratio']:.3f} of an unconstrained step")
