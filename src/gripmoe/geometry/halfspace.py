"""Stage 2 of Method A: keep unselected experts below their margins (Sec. 4.2, App. C).

`nearest_feasible` is the exact projection, of both stages at once; `randomized_kaczmarz` is Stage 2 of the paper's
Algorithm 1. Both solve all router rows (experts) at once, each as a problem of its own. bounds_NE is infinite where no
inequality applies.

N tokens, d hidden size, E experts, m active constraints, M some of the router rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from gripmoe.geometry.nullspace import RetainBasis, padded_indices

ADDED_PER_ROUND = 32  # violated constraints that become active at once, per row
IN_CACHE = 2**18  # numbers: active tokens that a CPU works on at once


def nearest_feasible(
    update_Ed: Tensor,
    basis: RetainBasis,
    x_Nd: Tensor,
    bounds_NE: Tensor,
    *,
    near_Ed: Tensor | None = None,
    tolerance: float = 1e-9,
    max_rounds: int = 1000,
    on_shrunk: Callable[[int], object] | None = None,
) -> Tensor:
    """The Euclidean projection of each row onto {u : U^T u = 0, <u, x_i> <= b_i}: both stages at once, (E, d) in the
    dtype of `update_Ed`.

    An active-set method: violated constraints become active, and the dual of the active ones is solved exactly in the
    Gram matrix of the *projected* tokens P x_i, so that the equalities of Stage 1 stay. `near_Ed`, a feasible point
    near the answer (that of the step before), names the first active constraints; it changes the time taken and nothing
    else. An excess below `tolerance`, or below what rounding changes in <u_j, x_i>, is no violation: 1e-6 (for fp64
    tokens 1e-12) of |x_i| times the norm of the row after Stage 1. A row that `max_rounds` leaves violated is shrunk
    towards 0, with a warning; `on_shrunk` is called with the number of such rows. Raises ValueError for a negative
    bound: u = 0 must be feasible.
    """
    if bounds_NE.numel() and bounds_NE.amin() < 0:
        raise ValueError("bounds must be >= 0, or u = 0 is not feasible; clamp the margins")
    rounding = 1e-12 if x_Nd.dtype == torch.float64 else 1e-6
    x_Nd = in_full_precision(x_Nd)
    x_norms_N = x_Nd.norm(dim=1)
    bounds_EN = bounds_NE.T.contiguous()
    basis = basis.double()

    # By row: `active_EN`, its active constraints; `entered_EN`, those that its latest solve had for the first time;
    # `solved_E`, whether it has had any. A round solves `rows_M`, in which the round before found violations.
    active_EN = torch.zeros_like(bounds_EN, dtype=torch.bool)
    if near_Ed is not None:
        slack_E1 = (1e-3 * near_Ed.norm(dim=1, keepdim=True)).clamp_max(1e-6)
        active_EN = (_scores(near_Ed, x_Nd) + slack_E1 > bounds_EN) & (slack_E1 > 0)  # none of a row that has not moved
    entered_EN = active_EN.clone()
    solved_E = active_EN.any(dim=1)
    rows_M: slice | Tensor = slice(None)
    start_Ed = update_Ed.to(torch.float64, copy=True)
    u_Ed = start_Ed.clone()
    if not solved_E.any():  # Stage 1; otherwise the first solve projects
        start_Ed = basis.remainder(start_Ed[:, None])[:, 0]
        u_Ed = basis.remainder(start_Ed[:, None])[:, 0]

    reached_EN = torch.empty_like(bounds_EN, dtype=x_Nd.dtype)
    for _ in range(max_rounds + 1):
        if solved_E.any():
            u_Ed[rows_M], start_Ed[rows_M], active_EN[rows_M] = _project_onto_active(
                start_Ed[rows_M],
                basis.of(rows_M),
                x_Nd,
                bounds_EN[rows_M],
                active_EN[rows_M],
                entered_EN[rows_M],
                rounding,
            )
        reached_EN[rows_M] = _scores(u_Ed[rows_M], x_Nd)
        norms_EN = torch.outer(start_Ed.norm(dim=1).to(x_Nd.dtype), x_norms_N)
        limits_EN = bounds_EN + (rounding * norms_EN).clamp_min(tolerance)
        excess_EN = reached_EN - limits_EN
        if excess_EN.amax() <= 0:
            return u_Ed.to(update_Ed.dtype)
        # A constraint that the latest solve had cannot be solved better: its excess is rounding.
        excess_EN = excess_EN.masked_fill(active_EN | entered_EN, -torch.inf)
        violated_E = excess_EN.amax(dim=1) > 0
        if not violated_E.any():
            break
        solved_E = solved_E | violated_E
        worst = excess_EN.topk(min(ADDED_PER_ROUND, len(x_Nd)), dim=1)
        entering_EN = torch.zeros_like(active_EN).scatter(1, worst.indices, worst.values > 0)
        entered_EN = torch.where(violated_E[:, None], entering_EN, entered_EN)
        active_EN = active_EN | entering_EN
        # To gather most of the bases takes longer than to solve all rows again.
        rows_M = slice(None) if 2 * violated_E.sum() > len(violated_E) else violated_E.nonzero()[:, 0]

    # An excess within rounding is no violation: at a bound of 0, it would shrink the row to 0.
    limits_EN = limits_EN.maximum(bounds_EN + 1e-9 * norms_EN)
    factors_E1 = _shrinking_factors(reached_EN, bounds_EN, (reached_EN > limits_EN) & solved_E[:, None])
    if num_shrunk := int((factors_E1 < 1).sum()):
        warnings.warn(
            "the projection onto the margins has not converged: router rows left beyond a margin are shrunk towards 0 "
            "and move less than they may; a lower learning rate exceeds fewer margins at once",
            stacklevel=2,
        )
        if on_shrunk:
            on_shrunk(num_shrunk)
    return (factors_E1 * u_Ed).to(update_Ed.dtype)


def _shrinking_factors(reached_EN: Tensor, bounds_EN: Tensor, beyond_EN: Tensor) -> Tensor:
    """What each row is multiplied by to reach no more than its bounds, (E, 1), where scores are `beyond_EN` them."""
    return torch.where(beyond_EN, bounds_EN / reached_EN.clamp_min(1e-30), 1).amin(dim=1, keepdim=True)


def _project_onto_active(
    start_Md: Tensor,
    basis: RetainBasis,
    x_Nd: Tensor,
    bounds_MN: Tensor,
    active_MN: Tensor,
    entered_MN: Tensor,
    rounding: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The points nearest to `start_Md` under the active constraints, `start_Md` projected by Stage 1, and which
    constraints the points touch, (M, N)."""
    on_cpu = x_Nd.device.type == "cpu"  # a GPU takes all rows: to ask how many are active would wait for it
    at_once = max(1, IN_CACHE // (max(1, int(active_MN.sum(dim=1).max())) * x_Nd.shape[1])) if on_cpu else len(start_Md)
    if at_once < len(start_Md):
        parts = []
        for rows in (slice(first, first + at_once) for first in range(0, len(start_Md), at_once)):
            own_MN = bounds_MN[rows], active_MN[rows], entered_MN[rows]
            parts.append(_project_onto_active(start_Md[rows], basis.of(rows), x_Nd, *own_MN, rounding))
        u_Md, start_Md, touched_MN = (torch.cat(part) for part in zip(*parts, strict=True))
        return u_Md, start_Md, touched_MN
    index_Mm, valid_Mm = padded_indices(active_MN.T)
    x_Mmd = x_Nd[index_Mm].double()
    coordinates_Mmr = basis.coordinates(torch.cat([x_Mmd, start_Md[:, None]], dim=1))
    free_Mmr, start_M1r = coordinates_Mmr[:, :-1], coordinates_Mmr[:, -1:]
    start_Mm = (free_Mmr @ start_M1r.transpose(1, 2))[..., 0]
    norms_Mm1 = free_Mmr.norm(dim=2, keepdim=True)
    # A token within the span up to rounding has no direction left to move along, and cannot be violated.
    usable_Mm = valid_Mm & (norms_Mm1 > rounding * x_Mmd.norm(dim=2, keepdim=True))[..., 0]
    norms_Mm1 = torch.where(usable_Mm[..., None], norms_Mm1, 1)
    free_Mmr = free_Mmr / norms_Mm1
    multipliers_Mm = _nonnegative_quadratic(
        gram_Mmm=free_Mmr @ free_Mmr.transpose(1, 2),
        gap_Mm=(start_Mm - bounds_MN.gather(1, index_Mm)) / norms_Mm1[..., 0],
        usable_Mm=usable_Mm,
        touched_Mm=(active_MN & ~entered_MN).gather(1, index_Mm),
        size_M1=start_M1r.norm(dim=2),
    )
    u_M1r = start_M1r - multipliers_Mm[:, None, :] @ free_Mmr
    u_Md, start_Md = basis.vectors(torch.cat([u_M1r, start_M1r], dim=1)).unbind(dim=1)
    return u_Md, start_Md, torch.zeros_like(active_MN).scatter(1, index_Mm, multipliers_Mm > 0)


def _nonnegative_quadratic(
    gram_Mmm: Tensor, gap_Mm: Tensor, usable_Mm: Tensor, touched_Mm: Tensor, size_M1: Tensor
) -> Tensor:
    """argmax over lambda >= 0 of lambda.gap - lambda.G lambda / 2, for a Gram matrix of unit rows, by block principal
    pivoting (Portugal et al., 1994): guess which multipliers are positive, solve, exchange all wrong guesses. A row in
    which that cycles starts again from `touched_Mm`, the positive multipliers of the solve before, with Lawson and
    Hanson's algorithm.

    `size_M1` are the norms of the starts. The dual is solved as the least-distance problem that it is (Lawson and
    Hanson, ch. 23.4): G + gap gap^T, with gaps in units of the norm, has multipliers of the same signs, and its
    equations have a solution even for more rows than dimensions.
    """
    size_M1 = size_M1.clamp_min(torch.finfo(gap_Mm.dtype).tiny)
    gap_Mm = (gap_Mm / size_M1).clamp_min(-1)  # no bound farther away is reached: 0 is feasible
    matrix_Mmm = gram_Mmm + gap_Mm[:, :, None] * gap_Mm[:, None, :]
    width = gap_Mm.shape[1]
    positive_Mm = usable_Mm & (gap_Mm > 0)
    feasible_Mm = torch.zeros_like(gap_Mm)  # where Lawson and Hanson's algorithm has come to
    fewest_M1 = torch.full_like(size_M1, width + 1)  # wrong guesses so far
    # Exchanges that may still fail to lower the number of wrong guesses. At -1 the row starts again, and then changes
    # one multiplier at a time.
    chances_M1 = torch.full_like(size_M1, 3)
    for _ in range(20 + 10 * width):
        solution_Mm, slack_Mm = _solution(matrix_Mmm, gap_Mm, positive_Mm)
        negative_Mm = positive_Mm & (solution_Mm < 0)
        missing_Mm = ~positive_Mm & usable_Mm & (slack_Mm < -1e-13)
        wrong_Mm = negative_Mm | missing_Mm
        if not wrong_Mm.any():
            break
        num_wrong_M1 = wrong_Mm.sum(dim=1, keepdim=True).to(fewest_M1.dtype)
        fewer_M1 = (num_wrong_M1 < fewest_M1) & (chances_M1 >= 0) | (num_wrong_M1 == 0)
        fewest_M1 = torch.where(fewer_M1, num_wrong_M1, fewest_M1)
        chances_M1 = torch.where(fewer_M1, 3, chances_M1 - 1)
        one_by_one_M1 = chances_M1 < -1
        moved_Mm, exchanged_Mm = _lawson_hanson(feasible_Mm, solution_Mm, slack_Mm, negative_Mm, missing_Mm)
        feasible_Mm = torch.where(one_by_one_M1, moved_Mm, feasible_Mm)
        exchanged_Mm = torch.where(one_by_one_M1, exchanged_Mm, wrong_Mm)
        positive_Mm = torch.where(chances_M1 == -1, usable_Mm & touched_Mm, positive_Mm ^ exchanged_Mm)
    else:
        solution_Mm = torch.where(wrong_Mm.any(dim=1, keepdim=True), feasible_Mm, solution_Mm)
    multipliers_Mm = solution_Mm.clamp_min(0)
    return size_M1 * multipliers_Mm / (1 - (multipliers_Mm * gap_Mm).sum(dim=1, keepdim=True))


def _solution(matrix_Mmm: Tensor, gap_Mm: Tensor, positive_Mm: Tensor) -> tuple[Tensor, Tensor]:
    """The multipliers that solve the equations of the positive ones, the others 0; and matrix @ multipliers - gap."""
    both_Mmm = positive_Mm[:, :, None] & positive_Mm[:, None, :]
    system_Mmm = torch.where(both_Mmm, matrix_Mmm, 0) + torch.diag_embed((~positive_Mm).to(gap_Mm.dtype))
    eye_mm = torch.eye(gap_Mm.shape[1], dtype=gap_Mm.dtype, device=gap_Mm.device)
    factor_Mmm = torch.linalg.cholesky_ex(system_Mmm + 1e-12 * eye_mm).L  # equal rows make the system singular
    right_Mm1 = torch.where(positive_Mm, gap_Mm, 0)[..., None]
    solution_Mm1 = torch.cholesky_solve(right_Mm1, factor_Mmm)
    solution_Mm1 += torch.cholesky_solve(right_Mm1 - system_Mmm @ solution_Mm1, factor_Mmm)
    return solution_Mm1[..., 0], (matrix_Mmm @ solution_Mm1)[..., 0] - gap_Mm


def _lawson_hanson(
    feasible_Mm: Tensor, solution_Mm: Tensor, slack_Mm: Tensor, negative_Mm: Tensor, missing_Mm: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of Lawson and Hanson's algorithm (1974, ch. 23): from `feasible_Mm` towards the solution, until a
    multiplier is 0. Also the multipliers that change sides: those that are 0 now, or if the step reaches the solution,
    the one most missing there."""
    shares_Mm = torch.where(negative_Mm, feasible_Mm / (feasible_Mm - solution_Mm), torch.inf)
    share_M1 = shares_Mm.amin(dim=1, keepdim=True)
    leaving_Mm = negative_Mm & (shares_Mm == share_M1)
    worst_Mm = missing_Mm & (slack_Mm == slack_Mm.masked_fill(~missing_Mm, 0).amin(dim=1, keepdim=True))
    moved_Mm = torch.lerp(feasible_Mm, solution_Mm, share_M1.clamp_max(1)).masked_fill(leaving_Mm, 0)
    return moved_Mm, leaving_Mm | (worst_Mm & share_M1.isinf())


def randomized_kaczmarz(
    update_Ed: Tensor,
    x_Nd: Tensor,
    bounds_NE: Tensor,
    *,
    max_steps: int = 100,
    tolerance: float = 1e-4,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Algorithm 1, phase 2: rows drawn with probability ||x_i||^2, a violated one projected onto its hyperplane along
    the raw x_i. Router rows whose violation is below `tolerance` are left alone (App. D, stochastic
    fallback).

    The result is *some* nearly feasible point, breaks the equalities of Stage 1 again (x_i is not orthogonal to the
    retain span), and usually still violates bounds after 100 draws; `nearest_feasible` has none of these faults.
    """
    triggered_E = violation(update_Ed, x_Nd, bounds_NE) > tolerance
    if not triggered_E.any():
        return update_Ed
    squared_norms_N = x_Nd.square().sum(dim=-1)
    weights_EN = torch.where(bounds_NE.isfinite(), squared_norms_N[:, None], 0).T
    rows = (triggered_E & weights_EN.any(dim=1)).nonzero()[:, 0]  # a zero token has no direction to project along
    u_Md, bounds_NM, weights_MN = update_Ed[rows].clone(), bounds_NE[:, rows], weights_EN[rows]
    draws_MK = torch.multinomial(weights_MN, max_steps, replacement=True, generator=generator)
    x_KMd, bounds_KM = x_Nd[draws_MK.T], bounds_NM.gather(0, draws_MK.T)
    steps_KMd = x_KMd / squared_norms_N[draws_MK.T][..., None]
    for x_Md, step_Md, bounds_M in zip(x_KMd, steps_KMd, bounds_KM, strict=True):  # few operations: each is small
        excess_M = ((u_Md * x_Md).sum(dim=-1) - bounds_M).clamp_min_(0)
        u_Md.addcmul_(excess_M[:, None], step_Md, value=-1)
    return update_Ed.index_copy(0, rows, u_Md)


def violation(update_Ed: Tensor, x_Nd: Tensor, bounds_NE: Tensor) -> Tensor:
    """By how much <u_j, x_i> exceeds its bound at worst, per expert, shape (E,); zero where nothing is violated."""
    x_Nd = x_Nd.to(torch.promote_types(x_Nd.dtype, update_Ed.dtype))
    return (_scores(update_Ed, x_Nd) - bounds_NE.T).amax(dim=1).clamp_min(0)


def _scores(update_Ed: Tensor, x_Nd: Tensor) -> Tensor:
    """<u_j, x_i>, (E, N); a quarter faster on CPUs than x @ u^T."""
    return update_Ed.to(x_Nd.dtype) @ x_Nd.T


def in_full_precision(x_Nd: Tensor) -> Tensor:
    """Tokens in fp32 at least, as routers see them; in fp64 where TF32 or autocast rounds fp32 products to less."""
    backend = torch.backends.cuda if x_Nd.is_cuda else torch.backends.mkldnn
    precisions = {backend.matmul.fp32_precision, torch.backends.fp32_precision}
    if precisions & {"tf32", "bf16"} or torch.is_autocast_enabled(x_Nd.device.type):
        return x_Nd.double()
    return x_Nd.to(torch.promote_types(x_Nd.dtype, torch.float32))
