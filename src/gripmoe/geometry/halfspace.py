"""Stage 2: keep unselected experts below their margins (Sec. 4.2, App. C).

N tokens, d hidden size, E experts, m active rows. Both solvers take bounds_NE with infinity wherever no inequality
applies, and treat every router row (expert) as its own problem, all rows at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gripmoe.geometry.nullspace import RetainBasis


def violation(update_Ed: Tensor, x_Nd: Tensor, bounds_NE: Tensor) -> Tensor:
    """By how much <u_j, x_i> exceeds its bound at worst, per expert, shape (E,); zero where nothing is violated."""
    return (x_Nd @ update_Ed.T - bounds_NE).amax(dim=0).clamp_min(0)


def randomized_kaczmarz(
    update_Ed: Tensor,
    x_Nd: Tensor,
    bounds_NE: Tensor,
    *,
    max_steps: int = 100,
    tolerance: float = 1e-4,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Algorithm 1, phase 2, to the letter: rows drawn with probability ||x_i||^2, a violated one projected onto its
    hyperplane along the raw x_i. Rows whose violation is below `tolerance` are left alone (App. D, stochastic fallback).

    It returns *some* nearly feasible point, re-breaks the equalities of Stage 1 (x_i is not orthogonal to the retain
    span), and after 100 draws usually leaves violations behind; `nearest_feasible` has none of the three faults.
    """
    triggered_E = violation(update_Ed, x_Nd, bounds_NE) > tolerance
    if not triggered_E.any():
        return update_Ed
    rows = triggered_E.nonzero()[:, 0]
    u_Md, bounds_NM = update_Ed[rows].clone(), bounds_NE[:, rows]
    squared_norms_N = x_Nd.square().sum(dim=-1)
    weights_MN = torch.where(bounds_NM.isfinite(), squared_norms_N[:, None], 0).T
    draws_MK = torch.multinomial(weights_MN, max_steps, replacement=True, generator=generator)
    each = torch.arange(len(rows), device=rows.device)
    for i_M in draws_MK.T:
        x_Md = x_Nd[i_M]
        excess_M = ((u_Md * x_Md).sum(dim=-1) - bounds_NM[i_M, each]).clamp_min(0)
        u_Md -= (excess_M / squared_norms_N[i_M])[:, None] * x_Md
    return update_Ed.index_copy(0, rows, u_Md)


def nearest_feasible(
    update_Ed: Tensor,
    basis: RetainBasis,
    x_Nd: Tensor,
    bounds_NE: Tensor,
    *,
    tolerance: float = 1e-9,
    max_rounds: int = 30,
    max_sweeps: int = 300,
) -> Tensor:
    """The Euclidean projection of each row onto {u : U^T u = 0, <u, x_i> <= b_i}: both stages at once.

    Active set with Hildreth's dual coordinate ascent on the Gram matrix of the *projected* rows P x_i, so that moving
    along them keeps the equalities. Solved in fp64, returned in the dtype of `update_Ed`. Bounds must not be negative:
    then u = 0 is feasible, and any violation left by the sweep limit is removed exactly by shrinking that row towards 0.
    Raises ValueError for a negative bound.
    """
    if (bounds_NE < 0).any():
        raise ValueError("bounds must be >= 0, or u = 0 is not feasible; clamp the margins")
    out_dtype = update_Ed.dtype
    basis = RetainBasis(basis.U_ret_Edr.double())
    x_Nd, bounds_NE = x_Nd.double(), bounds_NE.double()
    start_Ed = basis.project(update_Ed.double())
    excess_NE = x_Nd @ start_Ed.T - bounds_NE
    rows = (excess_NE > tolerance).any(dim=0).nonzero()[:, 0]
    if len(rows):
        shared = basis.U_ret_Edr.shape[0] == 1
        rows_basis = basis if shared else RetainBasis(basis.U_ret_Edr[rows])
        solved_Md = _solve_rows(
            start_Ed[rows], rows_basis, x_Nd, bounds_NE[:, rows], tolerance, max_rounds, max_sweeps
        )
        start_Ed = start_Ed.index_copy(0, rows, solved_Md)
    return start_Ed.to(out_dtype)


def _solve_rows(start_Md, basis, x_Nd, bounds_NM, tolerance, max_rounds, max_sweeps) -> Tensor:
    u_Md = start_Md
    active_NM = torch.zeros_like(bounds_NM, dtype=torch.bool)
    multipliers_NM = torch.zeros_like(bounds_NM)
    for _ in range(max_rounds):
        violated_NM = x_Nd @ u_Md.T - bounds_NM > tolerance
        if not (violated_NM & ~active_NM).any():
            break
        active_NM |= violated_NM
        index_Mm, valid_Mm = _padded_indices(active_NM)
        normals_Mmd = _project_rows(x_Nd[index_Mm], basis) * valid_Mm[..., None]
        gram_Mmm = normals_Mmd @ normals_Mmd.transpose(1, 2)
        gap_Mm = (normals_Mmd @ start_Md[..., None])[..., 0] - bounds_NM.T.gather(1, index_Mm)
        gap_Mm = torch.where(valid_Mm, gap_Mm, -torch.inf)
        warm_Mm = multipliers_NM.T.gather(1, index_Mm) * valid_Mm
        multipliers_Mm = _hildreth(gram_Mmm, gap_Mm, warm_Mm, tolerance, max_sweeps)
        multipliers_NM = torch.zeros_like(bounds_NM.T).scatter_add(1, index_Mm, multipliers_Mm).T
        u_Md = start_Md - (multipliers_Mm[:, None, :] @ normals_Mmd)[:, 0]
    return _shrunk_into_bounds(u_Md, x_Nd, bounds_NM)


def _hildreth(gram_Mmm: Tensor, gap_Mm: Tensor, multipliers_Mm: Tensor, tolerance: float, max_sweeps: int) -> Tensor:
    """max over lambda >= 0 of lambda.gap - lambda.G lambda / 2, by exact steps in one coordinate after another."""
    diagonal_Mm = gram_Mmm.diagonal(dim1=1, dim2=2)
    scale = diagonal_Mm.amax().clamp_min(torch.finfo(gram_Mmm.dtype).tiny)
    usable_Mm = (diagonal_Mm > 1e-12 * scale) & gap_Mm.isfinite()  # a row within the retain span cannot be violated
    multipliers_Mm = torch.where(usable_Mm, multipliers_Mm, 0)
    slope_Mm = torch.where(usable_Mm, gap_Mm, 0) - (gram_Mmm @ multipliers_Mm[..., None])[..., 0]
    for _ in range(max_sweeps):
        largest = torch.zeros((), dtype=gram_Mmm.dtype, device=gram_Mmm.device)
        for t in range(gap_Mm.shape[1]):
            step_M = torch.maximum(slope_Mm[:, t] / diagonal_Mm[:, t].clamp_min(1e-300), -multipliers_Mm[:, t])
            step_M = torch.where(usable_Mm[:, t], step_M, 0)
            multipliers_Mm[:, t] += step_M
            slope_Mm -= step_M[:, None] * gram_Mmm[:, :, t]
            largest = torch.maximum(largest, (step_M.abs() * diagonal_Mm[:, t]).amax())
        if largest < tolerance / 10:
            break
    return multipliers_Mm


def _project_rows(x_Mmd: Tensor, basis: RetainBasis) -> Tensor:
    for _ in range(2):
        x_Mmd = x_Mmd - (x_Mmd @ basis.U_ret_Edr) @ basis.U_ret_Edr.transpose(1, 2)
    return x_Mmd


def _padded_indices(active_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers of the active constraints of each expert, padded to one width, and which entries are real."""
    counts_M = active_NM.sum(dim=0)
    width = int(counts_M.max())
    index_Mm = active_NM.T.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
    return index_Mm, torch.arange(width, device=index_Mm.device) < counts_M[:, None]


def _shrunk_into_bounds(u_Md: Tensor, x_Nd: Tensor, bounds_NM: Tensor) -> Tensor:
    reached_NM = x_Nd @ u_Md.T
    allowed_NM = torch.where(reached_NM > bounds_NM, bounds_NM / reached_NM.clamp_min(1e-300), 1)
    return u_Md * allowed_NM.amin(dim=0)[:, None]
