"""One router row in the plane and one in space: the example that the schematic of Method A shows."""

from __future__ import annotations

import torch

from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz, violation
from gripmoe.geometry.nullspace import EpsNull, RetainStatistics

DRAWS = 8  # of Algorithm 1, in the plane


def router_row() -> dict:
    """Points as lists of numbers. `plane`: `tokens` (3, 2) that do not select the expert and their `bounds` (3), the
    `walk` of Algorithm 1 from the optimizer's step, draw by draw, and the `exact` projection. `space`: of the step, of
    Stage 1, and of both forms of Stage 2, by how much a selected token's score moves, the worst violation, and the
    distance from Stage 1."""
    return {"plane": _in_plane(), "space": _in_space()}


def _tensor(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _in_plane() -> dict[str, list]:
    tokens = _tensor([[1.0, 0.25], [0.35, 1.0], [0.9, -0.7]])
    bounds = _tensor([[0.8], [0.7], [0.75]])
    step = _tensor([[1.9, 1.3]])
    walk = [step]
    for draws in range(1, DRAWS + 1):
        generator = torch.Generator().manual_seed(3)
        walk.append(randomized_kaczmarz(step, tokens, bounds, max_steps=draws, generator=generator))
    exact = nearest_feasible(step, RetainStatistics(1, 2).basis(EpsNull(1e-4, "relative")), tokens, bounds)
    return {
        "tokens": tokens.tolist(),
        "bounds": bounds[:, 0].tolist(),
        "walk": torch.cat(walk).tolist(),
        "exact": exact[0].tolist(),
    }


def _in_space() -> list[dict]:
    selected = _tensor([[0.5, -0.4, 1.0]])
    others = _tensor([[1.0, 0.2, 0.5], [0.3, 1.0, 0.3]])
    limits = _tensor([[0.5], [0.5]])
    step = _tensor([[1.3, 1.1, 0.9]])
    statistics = RetainStatistics(1, 3).update(selected, torch.ones(1, 1, dtype=torch.bool))
    basis = statistics.basis(EpsNull(1e-4, "relative"))
    stage_1 = basis.project(step)
    generator = torch.Generator().manual_seed(0)
    stage_2 = randomized_kaczmarz(stage_1, others, limits, max_steps=60, tolerance=1e-6, generator=generator)
    exact = nearest_feasible(step, basis, others, limits)
    points = {"step": step, "Stage 1": stage_1, "Stage 2, paper": stage_2, "both, exact": exact}
    return [
        {
            "point": name,
            "fixed score moved": abs((u @ selected.T).item()),
            "worst violation": violation(u, others, limits).item(),
            "distance from Stage 1": (u - stage_1).norm().item(),
        }
        for name, u in points.items()
    ]
