"""One router layer of the paper's size and around it: `pytest tests/benchmarks`. Times scale with tokens, experts and
width as the arithmetic does; `floor` is what two passes of the dominant product take alone."""

import statistics
import time

import pytest
import torch

from gripmoe.geometry.halfspace import nearest_feasible
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import SelectionRule, route
from gripmoe.geometry.screening import ScreenedProjection

RANK = 64
PAPER = dict(N=1024, d=2048, E=128, k=8)
LAYERS = 4


def layer(N, d, E, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, d, generator=generator)
    rule = SelectionRule(k)
    theta = torch.randn(E, d, generator=generator) / d**0.5
    routing = route(x, theta, rule)
    held = rule.fixed(routing.scores_NE, routing.top_k_Nk)
    # Time does not ask what it spans, but how it lies in memory.
    span = torch.linalg.qr(torch.randn(E, d, RANK, generator=generator)).Q.contiguous()
    bounds = rule.margins(routing.scores_NE, routing.top_k_Nk).clamp_min(0).masked_fill(held, torch.inf)
    update = 1e-3 * torch.randn(E, d, generator=generator)
    return update, RetainBasis(span.double()), x, bounds


def seconds(function):
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@pytest.mark.parametrize("change", [{}, {"N": 256}, {"E": 32}, {"d": 512}], ids=["paper", "N/4", "E/4", "d/4"])
def test_sound_projection_of_one_layer(change, benchmark):
    """A first step, one that starts from the step before, and one that compares the tokens in reach alone, as training
    does."""
    update, basis, x, bounds = layer(**{**PAPER, **change})
    x64 = x.double()

    def first():
        return nearest_feasible(update, basis, x, bounds)

    before = first()
    moved = before + 0.03 * update

    def next_step():
        return nearest_feasible(moved, basis, x, bounds, near_Ed=before)

    screened = ScreenedProjection(basis, x, bounds)
    screened(moved, basis, before)

    def screened_step():
        return screened(moved, basis, before)

    def floor():
        update.double() @ x64.T
        basis.remainder(update.double()[:, None])

    sides = {"first": first, "next": next_step, "screened": screened_step}
    rounds = [[seconds(function) for function in (*sides.values(), floor)] for _ in range(7)]
    ratios = {side: round(statistics.median(row[n] / row[-1] for row in rounds), 1) for n, side in enumerate(sides)}
    benchmark.extra_info |= {f"{side}_over_floor": ratio for side, ratio in ratios.items()}
    print(f"\n{change or 'paper'}, times the floor: {ratios}")
    benchmark.pedantic(screened_step, rounds=3)


def test_sound_projection_of_several_layers(benchmark):
    """Each against one alone: their bases follow one another through the caches."""
    layers = []
    for number in range(LAYERS):
        update, basis, x, bounds = layer(**PAPER, seed=number)
        before = nearest_feasible(update, basis, x, bounds)
        layers.append((before + 0.03 * update, basis, x, bounds, before))

    def next_step(layers=layers):
        for moved, basis, x, bounds, before in layers:
            nearest_feasible(moved, basis, x, bounds, near_Ed=before)

    rounds = [(seconds(next_step) / LAYERS, seconds(lambda: next_step(layers[:1]))) for _ in range(7)]
    each, alone = (1e3 * statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(one / other for one, other in rounds)
    benchmark.extra_info["each_over_one_alone"] = round(ratio, 2)
    print(f"\n{LAYERS} layers: {each:.0f} ms each, one alone {alone:.0f} ms, ratio {ratio:.2f}")
    benchmark.pedantic(next_step, rounds=3)
