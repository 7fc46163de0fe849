"""One router layer of the paper's size and around it: `pytest tests/benchmarks`. Times scale with tokens, experts and
width as the arithmetic does; `floor` is what two passes of the dominant product take alone."""

import time

import pytest
import torch

from gripmoe.geometry.halfspace import nearest_feasible
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import SelectionRule, route

RANK = 64
PAPER = dict(N=1024, d=2048, E=128, k=8)


def layer(N, d, E, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, d, generator=generator)
    rule = SelectionRule(k)
    theta = torch.randn(E, d, generator=generator) / d**0.5
    routing = route(x, theta, rule)
    held = rule.held(routing.scores_NE, routing.top_k_Nk)
    # Time does not ask what it spans, but how it lies in memory.
    span = torch.linalg.qr(torch.randn(E, d, RANK, generator=generator)).Q.contiguous()
    bounds = rule.margins(routing.scores_NE, routing.top_k_Nk).clamp_min(0).masked_fill(held, torch.inf)
    update = 1e-3 * torch.randn(E, d, generator=generator)
    return update, RetainBasis(span.double()), x.double(), bounds.double()


@pytest.mark.parametrize("change", [{}, {"N": 256}, {"E": 32}, {"d": 512}], ids=["paper", "N/4", "E/4", "d/4"])
def test_sound_projection_of_one_layer(change, benchmark):
    update, basis, x, bounds = layer(**{**PAPER, **change})

    def floor():
        update.double() @ x.T
        basis.remainder(update.double()[:, None])

    def seconds(function, *arguments):
        times = []
        for _ in range(3):
            started = time.perf_counter()
            function(*arguments)
            times.append(time.perf_counter() - started)
        return min(times)

    ratio = seconds(nearest_feasible, update, basis, x, bounds) / seconds(floor)
    benchmark.extra_info["over_floor"] = round(ratio, 1)
    print(f"\n{change or 'paper'}: {ratio:.1f} times the floor")
    benchmark.pedantic(nearest_feasible, args=(update, basis, x, bounds), rounds=3)
