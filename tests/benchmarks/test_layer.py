"""One router layer of the paper's size and around it: `pytest tests/benchmarks`. Times scale with tokens, experts and
width as the arithmetic does; `floor` is what two passes of the dominant product take alone."""

import pytest
import torch

from gripmoe.geometry.halfspace import nearest_feasible
from gripmoe.geometry.nullspace import EpsNull, RetainStatistics
from gripmoe.geometry.routing import SelectionRule, route

PAPER = dict(N=1024, d=2048, E=128, k=8)


def layer(N, d, E, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, d, generator=generator)
    rule = SelectionRule(k)
    theta = torch.randn(E, d, generator=generator) / d**0.5
    routing = route(x, theta, rule)
    held = rule.held(routing.scores_NE, routing.top_k_Nk)
    basis = RetainStatistics(E, d, max_rank=128).update(x, held).basis(EpsNull(1e-4, "relative"))
    bounds = rule.margins(routing.scores_NE, routing.top_k_Nk).clamp_min(0).masked_fill(held, torch.inf)
    update = 1e-3 * torch.randn(E, d, generator=generator)
    return update, type(basis)(basis.U_ret_Edr.float()), x, bounds


@pytest.mark.parametrize("change", [{}, {"N": 256}, {"E": 32}, {"d": 512}], ids=["paper", "N/4", "E/4", "d/4"])
def test_sound_projection_of_one_layer(change, benchmark):
    update, basis, x, bounds = layer(**{**PAPER, **change})
    U, x64, update64 = basis.U_ret_Edr.double(), x.double(), update.double()

    def floor():
        x64 @ update64.T
        (update64[:, None] @ U) @ U.transpose(1, 2)

    import time

    started = time.perf_counter()
    floor()
    benchmark.extra_info["floor_ms"] = round(1e3 * (time.perf_counter() - started), 1)
    benchmark.pedantic(nearest_feasible, args=(update, type(basis)(U), x64, bounds.double()), rounds=3, warmup_rounds=1)
