"""One router row in the plane and one in space: the example that the schematic of Method A shows."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import torch

from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz, violation
from gripmoe.geometry.nullspace import EpsNull, RetainBasis, RetainStatistics

DRAWS = 8  # of Algorithm 1, in the plane

_tensor = partial(torch.tensor, dtype=torch.float64)
# In the plane: tokens that do not select the expert, their bounds, and the optimizer's step.
TOKENS = _tensor([[1.0, 0.25], [0.35, 1.0], [0.9, -0.7]])
BOUNDS = _tensor([[0.8], [0.7], [0.75]])
STEP = _tensor([[1.9, 1.3]])


def router_row() -> dict:
    """Points as lists of numbers. `plane`: `tokens` (3, 2) that do not select the expert and their `bounds` (3), the
    `walk` of Algorithm 1 from the optimizer's step, draw by draw, and the `exact` projection. `space`: of the step, of
    Stage 1, and of both forms of Stage 2, by how much a selected token's score moves, the worst violation, and the
    distance from Stage 1."""
    return {"plane": _in_plane(), "space": _in_space()}


def kaczmarz_rate(draws: int = 40, walks: int = 1000) -> dict[str, list[float]]:
    """Theorem C.1 in the plane: by number of draws the mean squared `distance` from the feasible set over independent
    walks of Algorithm 1, and its `bound` (Eq. 18), with the greatest 1 / sigma_min of independent tokens for H."""
    tokens, limits = TOKENS, BOUNDS.expand(-1, walks)
    start, nothing_fixed = STEP.repeat(walks, 1), RetainBasis(tokens.new_zeros(1, 2, 0))
    some = [tokens[list(rows)] for count in (1, 2) for rows in combinations(range(len(tokens)), count)]
    hoffman = max(1 / torch.linalg.matrix_norm(rows, -2).item() for rows in some)
    distance = []
    for number in range(draws + 1):
        generator = torch.Generator().manual_seed(number)
        options = dict(max_steps=number, tolerance=0.0, generator=generator)
        ends = randomized_kaczmarz(start, tokens, limits, **options) if number else start
        nearest = nearest_feasible(ends, nothing_fixed, tokens, limits)
        distance.append((ends - nearest).square().sum(dim=1).mean().item())
    rate = 1 - 1 / (hoffman**2 * tokens.square().sum().item())
    return {"distance": distance, "bound": [distance[0] * rate**number for number in range(draws + 1)]}


def _in_plane() -> dict[str, list]:
    walk = [STEP]
    for draws in range(1, DRAWS + 1):
        generator = torch.Generator().manual_seed(3)
        walk.append(randomized_kaczmarz(STEP, TOKENS, BOUNDS, max_steps=draws, generator=generator))
    exact = nearest_feasible(STEP, RetainStatistics(1, 2).basis(EpsNull(1e-4, "relative")), TOKENS, BOUNDS)
    return {
        "tokens": TOKENS.tolist(),
        "bounds": BOUNDS[:, 0].tolist(),
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
