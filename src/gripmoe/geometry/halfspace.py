"""Stage 2: keep unselected experts below their margins (Sec. 4.2, App. C).

N tokens, d hidden size, E experts, m active constraints, M rows with a violation. Both solvers take bounds_NE with
infinity wherever no inequality applies, and treat every router row (expert) as its own problem, all rows at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gripmoe.geometry.nullspace import RetainBasis, padded_indices


def violation(update_Ed: Tensor, x_Nd: Tensor, bounds_NE: Tensor) -> Tensor:
    """By how much <u_j, x_i> exceeds its bound at worst, per expert, shape (E,); zero where nothing is violated."""
    x_Nd = x_Nd.to(torch.promote_types(x_Nd.dtype, update_Ed.dtype))
    return (_scores(update_Ed, x_Nd) - bounds_NE.T).amax(dim=1).clamp_min(0)


def _scores(update_Ed: Tensor, x_Nd: Tensor) -> Tensor:
    """<u_j, x_i>, (E, N); a quarter faster on CPUs than x @ u^T."""
    return update_Ed.to(x_Nd.dtype) @ x_Nd.T


def _exact(x_Nd: Tensor) -> Tensor:
    """Tokens in fp32 at least, as routers see them; in fp64 where products of fp32 are rounded to less."""
    backend = torch.backends.cuda if x_Nd.is_cuda else torch.backends.mkldnn
    precisions = {backend.matmul.fp32_precision, torch.backends.fp32_precision}
    if precisions & {"tf32", "bf16"} or torch.is_autocast_enabled(x_Nd.device.type):
        return x_Nd.double()
    return x_Nd.to(torch.promote_types(x_Nd.dtype, torch.float32))


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
    hyperplane along the raw x_i. Rows whose violation is below `tolerance` are left alone (App. D, stochastic
    fallback).

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
    near_Ed: Tensor | None = None,
    tolerance: float = 1e-9,
    max_rounds: int = 50,
) -> Tensor:
    """The Euclidean projection of each row onto {u : U^T u = 0, <u, x_i> <= b_i}: both stages at once.

    Constraints enter as they are violated; on those the dual is solved exactly, in the Gram matrix of the *projected*
    rows P x_i, so that moving along them keeps the equalities. `near_Ed`, a feasible point close to the answer (the one
    of the step before), names the constraints to begin with; it changes the time taken and nothing else. Violations are
    looked for in the precision of the tokens, fp32 at least; the rest is in fp64, the answer in the dtype of
    `update_Ed`. What exceeds its bound by less than `tolerance`, or by less than the rounding of x_i changes <u_j, x_i>
    (1e-6 of the product of their norms, 1e-12 for fp64 tokens), is no violation: a token within the span up to rounding
    leaves nothing to correct. Bounds must not be negative: then u = 0 is feasible, and what the limit on rounds may
    leave violated is removed by shrinking that row towards 0. Raises ValueError for a negative bound.
    """
    if bounds_NE.numel() and bounds_NE.amin() < 0:
        raise ValueError("bounds must be >= 0, or u = 0 is not feasible; clamp the margins")
    rounding = 1e-12 if x_Nd.dtype == torch.float64 else 1e-6
    x_Nd = _exact(x_Nd)
    bounds_EN = bounds_NE.T.contiguous()
    active_EN = torch.zeros_like(bounds_EN, dtype=torch.bool)
    if near_Ed is not None:
        slack_E1 = (1e-3 * near_Ed.norm(dim=1, keepdim=True)).clamp_max(1e-6)
        active_EN = _scores(near_Ed, x_Nd) + slack_E1 > bounds_EN  # none of a router that has not moved
    solved_E = active_EN.any(dim=1)
    basis = RetainBasis(basis.U_ret_Edr.double())
    start_Ed = update_Ed.to(torch.float64, copy=True)  # projected here, or with the active constraints
    u_Ed = start_Ed.clone()
    if not solved_E.any():
        start_Ed = basis.remainder(start_Ed[:, None])[:, 0]
        u_Ed = basis.remainder(start_Ed[:, None])[:, 0]
    x_norms_N = x_Nd.norm(dim=1)
    rows_M: slice | Tensor = slice(None)  # of which the scores are not yet known
    reached_EN = torch.empty_like(bounds_EN, dtype=x_Nd.dtype)
    for _ in range(max_rounds + 1):
        if solved_E.any():
            own = basis if len(basis.U_ret_Edr) == 1 else RetainBasis(basis.U_ret_Edr[rows_M])
            u_Ed[rows_M], start_Ed[rows_M], active_EN[rows_M] = _on_active(
                start_Ed[rows_M], own, x_Nd, bounds_EN[rows_M], active_EN[rows_M], rounding
            )
        reached_EN[rows_M] = _scores(u_Ed[rows_M], x_Nd)
        norms_EN = torch.outer(start_Ed.norm(dim=1).to(x_Nd.dtype), x_norms_N)
        limits_EN = bounds_EN + (rounding * norms_EN).clamp_min(tolerance)
        excess_EN = reached_EN - limits_EN
        if excess_EN.amax() <= 0:
            return u_Ed.to(update_Ed.dtype)
        excess_EN = excess_EN.masked_fill(active_EN, -torch.inf)
        pending_E = excess_EN.amax(dim=1) > 0
        if not pending_E.any():
            break
        solved_E = solved_E | pending_E
        worst = excess_EN.topk(min(ADDED_PER_ROUND, len(x_Nd)), dim=1)
        entering = active_EN.gather(1, worst.indices) | (worst.values > 0)
        active_EN = active_EN.scatter(1, worst.indices, entering)
        # To gather most of the bases takes longer than to solve all rows again.
        rows_M = slice(None) if 2 * pending_E.sum() > len(pending_E) else pending_E.nonzero()[:, 0]
    limits_EN = limits_EN.maximum(bounds_EN + 1e-9 * norms_EN)
    return _shrunk(u_Ed, bounds_EN, limits_EN, reached_EN, solved_E).to(update_Ed.dtype)


def _shrunk(u_Ed: Tensor, bounds_EN: Tensor, limits_EN: Tensor, reached_EN: Tensor, violated_E: Tensor) -> Tensor:
    """What the limit on rounds has left: towards 0, which is feasible. What no round looks at, and what regularising
    the solve leaves, is no violation: at a bound of 0 it would cost the whole row. Rows never violated stay as they
    are."""
    rows_M = ((reached_EN > limits_EN).any(dim=1) & violated_E).nonzero()[:, 0]
    if not len(rows_M):
        return u_Ed
    reached_MN, bounds_MN = reached_EN[rows_M], bounds_EN[rows_M]
    allowed_MN = torch.where(reached_MN > limits_EN[rows_M], bounds_MN / reached_MN.clamp_min(1e-30), 1)
    return u_Ed.index_copy(0, rows_M, u_Ed[rows_M] * allowed_MN.amin(dim=1, keepdim=True))


ADDED_PER_ROUND = 32  # violated constraints that enter at once, per row
IN_CACHE = 2**18  # numbers: active tokens that a CPU works on at once


def _on_active(
    start_Md: Tensor,
    basis: RetainBasis,
    x_Nd: Tensor,
    bounds_MN: Tensor,
    active_MN: Tensor,
    rounding: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest points to `start_Md` that respect the active constraints, `start_Md` projected, and which constraints
    the points touch, (M, N); all rows at once on a GPU, as many as its cache holds on a CPU."""
    on_cpu = x_Nd.device.type == "cpu"  # else to ask how many are active would wait for the GPU
    at_once = max(1, IN_CACHE // (max(1, int(active_MN.sum(dim=1).max())) * x_Nd.shape[1])) if on_cpu else len(start_Md)
    if at_once < len(start_Md):
        parts = []
        for rows in (slice(first, first + at_once) for first in range(0, len(start_Md), at_once)):
            own = basis if len(basis.U_ret_Edr) == 1 else RetainBasis(basis.U_ret_Edr[rows])
            parts.append(_on_active(start_Md[rows], own, x_Nd, bounds_MN[rows], active_MN[rows], rounding))
        u_Md, start_Md, touched_MN = (torch.cat(part) for part in zip(*parts, strict=True))
        return u_Md, start_Md, touched_MN
    index_Mm, valid_Mm = padded_indices(active_MN.T)
    x_Mmd = x_Nd[index_Mm].double()
    free_Mmd, start_Md = basis.remainder(torch.cat([x_Mmd, start_Md[:, None]], dim=1)).split_with_sizes(
        [x_Mmd.shape[1], 1], dim=1
    )
    start_Md = start_Md[:, 0]
    norms_Mm1 = free_Mmd.norm(dim=2, keepdim=True)
    # A token within the span up to rounding has no direction left to move along, and cannot be violated.
    usable_Mm = valid_Mm & (norms_Mm1 > rounding * x_Mmd.norm(dim=2, keepdim=True))[..., 0]
    norms_Mm1 = torch.where(usable_Mm[..., None], norms_Mm1, 1)
    free_Mmd = free_Mmd / norms_Mm1
    start_Mm = (x_Mmd @ start_Md[..., None])[..., 0]
    gap_Mm = (start_Mm - bounds_MN.gather(1, index_Mm)) / norms_Mm1[..., 0]
    multipliers_Mm = _nonnegative_quadratic(free_Mmd @ free_Mmd.transpose(1, 2), gap_Mm, usable_Mm)
    u_Md = basis.remainder(start_Md[:, None] - multipliers_Mm[:, None, :] @ free_Mmd)[:, 0]
    return u_Md, start_Md, torch.zeros_like(active_MN).scatter(1, index_Mm, multipliers_Mm > 0)


def _nonnegative_quadratic(gram_Mmm: Tensor, gap_Mm: Tensor, usable_Mm: Tensor, max_exchanges: int = 200) -> Tensor:
    """argmax over lambda >= 0 of lambda.gap - lambda.G lambda / 2, for a Gram matrix of unit rows, by block principal
    pivoting (Portugal et al., 1994): guess which multipliers are positive, solve, exchange all wrong guesses, and one
    at a time where that cycles."""
    size = gram_Mmm.shape[1]
    eye_mm = torch.eye(size, dtype=gram_Mmm.dtype, device=gram_Mmm.device)
    positive_Mm = usable_Mm & (gap_Mm > 0)
    fewest_M = torch.full_like(gap_Mm[:, 0], size + 1)
    chances_M = torch.full_like(fewest_M, 3)
    for _ in range(max_exchanges):
        both_Mmm = positive_Mm[:, :, None] & positive_Mm[:, None, :]
        system_Mmm = torch.where(both_Mmm, gram_Mmm, 0) + torch.diag_embed((~positive_Mm).to(gram_Mmm.dtype))
        factor_Mmm = torch.linalg.cholesky_ex(system_Mmm + 1e-12 * eye_mm).L  # equal rows make the system singular
        right_Mm1 = torch.where(positive_Mm, gap_Mm, 0)[..., None]
        multipliers_Mm1 = torch.cholesky_solve(right_Mm1, factor_Mmm)
        multipliers_Mm1 += torch.cholesky_solve(right_Mm1 - system_Mmm @ multipliers_Mm1, factor_Mmm)
        multipliers_Mm = multipliers_Mm1[..., 0]
        slack_Mm = (gram_Mmm @ multipliers_Mm[..., None])[..., 0] - gap_Mm
        wrong_Mm = (positive_Mm & (multipliers_Mm < 0)) | (~positive_Mm & usable_Mm & (slack_Mm < -1e-12))
        num_wrong_M = wrong_Mm.sum(dim=1).to(fewest_M.dtype)
        if not wrong_Mm.any():
            break
        fewer_M = num_wrong_M < fewest_M
        fewest_M = torch.where(fewer_M, num_wrong_M, fewest_M)
        chances_M = torch.where(fewer_M, 3, chances_M - 1)
        last_Mm = wrong_Mm & (wrong_Mm.to(torch.int8).flip(1).cumsum(dim=1).flip(1) == 1)
        positive_Mm = positive_Mm ^ torch.where((chances_M >= 0)[:, None], wrong_Mm, last_Mm)
    return multipliers_Mm.clamp_min(0) * positive_Mm
