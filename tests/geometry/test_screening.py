"""Screening leaves out tokens that cannot bind, and no others."""

import pytest
import torch

from gripmoe.geometry import screening
from gripmoe.geometry.halfspace import nearest_feasible, violation
from gripmoe.geometry.nullspace import EpsNull, RetainBasis, RetainStatistics
from gripmoe.geometry.routing import SelectionRule, route, selection_mask
from gripmoe.geometry.screening import ScreenedProjection

N, E, d, k = 400, 6, 24, 2
STEPS = 40


def polyhedron(seed: int = 0, rank: int | None = 12) -> tuple[RetainBasis, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_Nd, theta_Ed = (torch.randn(n, d, generator=generator, dtype=torch.float64) for n in (N, E))
    seen, rule = route(x_Nd, theta_Ed, SelectionRule(k)), SelectionRule(k)
    fixed_NE = selection_mask(seen.top_k_Nk, E)
    basis = RetainStatistics(E, d, rank).update(x_Nd[:60], fixed_NE[:60]).basis(EpsNull(1e-12, "relative"))
    bounds_NE = rule.margins(seen.scores_NE, seen.top_k_Nk).clamp_min(0).masked_fill(fixed_NE, torch.inf)
    return basis, x_Nd, bounds_NE


def walk(basis, x_Nd, bounds_NE, project, step: float):
    """The feasible points of a router whose every step is projected, and those over all tokens of the same updates."""
    generator, at_Ed = torch.Generator().manual_seed(1), torch.zeros(E, d, dtype=torch.float64)
    drift_Ed = step * torch.randn(E, d, generator=generator, dtype=torch.float64)
    for _ in range(STEPS):
        update_Ed = at_Ed + drift_Ed + step * torch.randn(E, d, generator=generator, dtype=torch.float64)
        all_Ed = nearest_feasible(update_Ed, basis, x_Nd, bounds_NE, tolerance=1e-12)
        yield project(update_Ed, basis, at_Ed, tolerance=1e-12), all_Ed
        at_Ed = all_Ed


@pytest.mark.parametrize("step", [1e-3, 1e-2, 0.3])
@pytest.mark.parametrize("narrow", [False, True])
def test_few_tokens_give_the_answer_of_all(step, narrow):
    basis, x_Nd, bounds_NE = polyhedron()
    screened = ScreenedProjection(basis.narrow() if narrow else basis, x_Nd, bounds_NE)
    compared, moved = [], 0.0
    for found_Ed, all_Ed in walk(basis, x_Nd, bounds_NE, screened, step):
        torch.testing.assert_close(found_Ed, all_Ed, atol=1e-10, rtol=0)
        compared.append(len(screened._tokens_in_reach_Nd))
        moved = max(moved, all_Ed.norm().item())
    bound = (all_Ed @ x_Nd.T > bounds_NE.T - 1e-9).any(dim=1)
    assert bound.any(), "the control: some margins are reached"
    if step == 1e-3:
        assert max(compared) < N / 4


def test_tokens_in_reach_are_needed(monkeypatch):
    """The control of the test above: with a tenth of the distance some bounds are missed."""
    basis, x_Nd, bounds_NE = polyhedron()
    monkeypatch.setattr(screening, "ROUNDING", 0.0)
    free_norms = RetainBasis.free_norms
    monkeypatch.setattr(RetainBasis, "free_norms", lambda basis, x: 0.01 * free_norms(basis, x))
    screened = ScreenedProjection(basis, x_Nd, bounds_NE)
    farthest = max((found - best).norm() for found, best in walk(basis, x_Nd, bounds_NE, screened, 1e-2))
    assert farthest > 1e-3


def test_tokens_almost_within_the_span_are_in_reach():
    """What an fp32 basis leaves free of a token may be less than its rounding, and bind all the same. Of many tokens,
    this is the one whose part within the span rounding makes longer than the token."""
    generator = torch.Generator().manual_seed(0)
    axes_dd = torch.linalg.qr(torch.randn(256, 256, generator=generator, dtype=torch.float64)).Q
    span_dr, free_d = axes_dd[:, :252], axes_dd[:, 252]
    inside_Nd = torch.randn(40, 252, generator=generator, dtype=torch.float64) @ span_dr.T
    x_Nd = (50 * inside_Nd / inside_Nd.norm(dim=1, keepdim=True) + 6e-4 * free_d).float()
    basis = RetainBasis(span_dr[None].float())
    excess_N = (x_Nd.double() @ basis.columns_Edr[0].double()).norm(dim=1) - x_Nd.double().norm(dim=1)
    assert excess_N.max() > 0
    x_Nd, bounds_N1 = x_Nd[excess_N.argmax()][None], torch.tensor([[2e-4]])
    update_1d = free_d[None].float()
    given = update_1d, basis, torch.zeros_like(update_1d)
    assert violation(basis.double().project(update_1d.double()).float(), x_Nd, bounds_N1) > 3e-4, "the control"
    found_1d = ScreenedProjection(basis, x_Nd, bounds_N1)(*given, tolerance=1e-6)
    assert violation(found_1d, x_Nd, bounds_N1) < 1e-4


def test_from_a_point_that_is_not_feasible_all_tokens_are_compared():
    basis, x_Nd, bounds_NE = polyhedron()
    screened = ScreenedProjection(basis, x_Nd, bounds_NE)
    generator = torch.Generator().manual_seed(2)
    beyond_Ed = 10 * basis.project(torch.randn(E, d, generator=generator, dtype=torch.float64))
    found_Ed = screened(beyond_Ed, basis, beyond_Ed, tolerance=1e-12)
    assert len(screened._tokens_in_reach_Nd) == N
    torch.testing.assert_close(found_Ed, nearest_feasible(beyond_Ed, basis, x_Nd, bounds_NE, tolerance=1e-12))


def test_a_router_without_a_token_in_reach_is_projected_by_stage_1_alone():
    basis, x_Nd, bounds_NE = polyhedron()
    bounds_NE = bounds_NE.clamp_min(1.0)
    screened = ScreenedProjection(basis, x_Nd, bounds_NE)
    update_Ed = 1e-6 * torch.ones(E, d, dtype=torch.float64)
    found_Ed = screened(update_Ed, basis, torch.zeros_like(update_Ed))
    assert len(screened._tokens_in_reach_Nd) == 0
    torch.testing.assert_close(found_Ed, basis.project(update_Ed))


def test_the_narrow_basis_projects_alike():
    """Of bases of a few directions, of nearly all and of all; and only where the complement is narrower."""
    generator = torch.Generator().manual_seed(0)
    x_Emd = torch.randn(3, 5, d, generator=generator, dtype=torch.float64)
    span_Edd = torch.linalg.qr(torch.randn(3, d, d, generator=generator, dtype=torch.float64)).Q
    for ranks, narrower in (((d, d - 3, d - 8), True), ((d, d, d), True), ((2, 3, 4), False)):
        kept = torch.arange(max(ranks)) < torch.tensor(ranks)[:, None]
        basis = RetainBasis(torch.where(kept[:, None], span_Edd[..., : max(ranks)], 0))
        narrow = basis.narrow()
        assert narrow.is_complement == narrower and narrow.ranks.tolist() == list(ranks)
        torch.testing.assert_close(narrow.remainder(x_Emd), basis.remainder(x_Emd), atol=1e-12, rtol=0)
        for each in (basis, narrow):
            free_Em = torch.stack([each.free_norms(x_md)[e] for e, x_md in enumerate(x_Emd)])
            torch.testing.assert_close(free_Em, basis.remainder(x_Emd).norm(dim=2), atol=1e-6, rtol=0)
            coordinates_Emr = each.coordinates(x_Emd)
            gram_Emm = coordinates_Emr @ coordinates_Emr.transpose(1, 2)
            torch.testing.assert_close(gram_Emm, basis.remainder(x_Emd) @ x_Emd.transpose(1, 2), atol=1e-12, rtol=0)
            torch.testing.assert_close(each.vectors(coordinates_Emr), basis.remainder(x_Emd), atol=1e-12, rtol=0)
