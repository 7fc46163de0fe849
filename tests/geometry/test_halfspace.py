"""Stage 2: what the exact solver promises, and what the paper's randomized Kaczmarz leaves behind."""

import itertools

import pytest
import torch

from gripmoe.geometry import halfspace
from gripmoe.geometry.example import kaczmarz_rate
from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz, violation
from gripmoe.geometry.nullspace import EpsNull, RetainBasis, RetainStatistics
from gripmoe.geometry.routing import SelectionRule, route, selection_margins, selection_mask


def instance(N=120, d=24, E=8, k=2, seed=0, scale=0.5):
    """Tokens, their basis and clamped margins under a random router, and an update that violates many of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, d, generator=generator, dtype=torch.float64)
    theta = torch.randn(E, d, generator=generator, dtype=torch.float64)
    routing = route(x, theta, SelectionRule(k))
    selected = selection_mask(routing.top_k_Nk, E)
    basis = RetainStatistics(E, d).update(x[:40], selected[:40]).basis(EpsNull(1e-12, "relative"))
    bounds = (selection_margins(routing.scores_NE, selected) - 1e-3).clamp_min(0).masked_fill(selected, torch.inf)
    update = scale * torch.randn(E, d, generator=generator, dtype=torch.float64)
    return x, basis, bounds, update


def test_rows_that_the_limit_on_rounds_leaves_violated_are_shrunk_and_counted():
    """The control: without the limit no row is shrunk, and none is as far from its update."""
    x, basis, bounds, update = instance(scale=5.0)
    counts = []
    with pytest.warns(UserWarning, match="shrunk towards 0"):
        shrunk = nearest_feasible(update, basis, x, bounds, max_rounds=1, on_shrunk=counts.append)
    assert violation(shrunk, x, bounds).max() < 1e-9
    solved = nearest_feasible(update, basis, x, bounds, on_shrunk=counts.append)
    farther = (shrunk - update).norm(dim=1) > (solved - update).norm(dim=1) + 1e-9
    assert counts == [farther.sum()] and farther.any()


def test_a_router_that_has_not_moved_starts_from_no_constraint(monkeypatch):
    """Under group limits most bounds are 0: all of these at once would not fit memory. The control is the first step
    of a solve without a near point."""
    x, basis, bounds, update = instance(scale=2.0)
    bounds = torch.where(torch.rand(bounds.shape, generator=torch.Generator().manual_seed(0)) < 0.9, 0, bounds)
    active, solve = [], halfspace._project_onto_active

    def counting(*args):
        active[-1].append(int(args[4].sum()))
        return solve(*args)

    monkeypatch.setattr(halfspace, "_project_onto_active", counting)
    for near in (None, torch.zeros_like(update)):
        active.append([])
        nearest_feasible(update, basis, x, bounds, near_Ed=near)
    assert active[0] and active[0] == active[1]


@pytest.mark.parametrize("in_cache", [1, 200, 2**30])
def test_rows_are_solved_as_well_a_few_at_a_time(in_cache, monkeypatch):
    x, basis, bounds, update = instance(scale=2.0)
    at_once = nearest_feasible(update, basis, x, bounds)
    monkeypatch.setattr(halfspace, "IN_CACHE", in_cache)
    torch.testing.assert_close(nearest_feasible(update, basis, x, bounds), at_once, atol=1e-12, rtol=0)


def test_feasible_update_is_not_touched():
    x, basis, bounds, update = instance()
    inside = basis.project(update) * 1e-6
    inside = torch.where((x @ inside.T > bounds).any(dim=0)[:, None], 0, inside)
    torch.testing.assert_close(nearest_feasible(inside, basis, x, bounds), inside, atol=1e-15, rtol=0)


def test_negative_bounds_are_refused():
    x, basis, bounds, update = instance()
    with pytest.raises(ValueError, match="clamp the margins"):
        nearest_feasible(update, basis, x, bounds - 10)


def test_kaczmarz_single_violated_row_by_hand():
    x = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    bounds = torch.tensor([[1.0]], dtype=torch.float64)
    moved = randomized_kaczmarz(torch.tensor([[3.0, 5.0]], dtype=torch.float64), x, bounds, max_steps=1)
    assert moved.tolist() == [[0.5, 5.0]]


def test_kaczmarz_draws_a_row_with_the_probability_of_its_squared_norm():
    """Nine of ten draws are of the first, which sets its coordinate to 0; a tenth is of the other one."""
    x, bounds = torch.tensor([[3.0, 0.0], [0.0, 1.0]]).double(), torch.zeros(2, 4000).double()
    options = dict(max_steps=1, tolerance=0.0, generator=torch.Generator().manual_seed(0))
    moved = randomized_kaczmarz(torch.ones(4000, 2).double(), x, bounds, **options)
    assert (moved.abs() < 1e-9).double().mean(dim=0).tolist() == pytest.approx([0.9, 0.1], abs=0.02)


def test_kaczmarz_reduces_violation_and_respects_its_trigger():
    x, basis, bounds, update = instance(scale=2.0)
    start = basis.project(update)
    generator = torch.Generator().manual_seed(0)
    moved = randomized_kaczmarz(start, x, bounds, max_steps=2000, generator=generator)
    assert violation(moved, x, bounds).sum() < 0.2 * violation(start, x, bounds).sum()
    untouched = randomized_kaczmarz(start, x, bounds, tolerance=1e6, generator=generator)
    assert untouched is start


def test_zero_tokens_move_no_router_row():
    """As of states that have overflown: no draw can mend the violated bound of a zero token."""
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    bounds = torch.tensor([[-0.1, -0.1], [torch.inf, 0.5]])
    update = torch.ones(2, 2)
    moved = randomized_kaczmarz(update, x, bounds, generator=torch.Generator().manual_seed(0))
    assert moved[0].tolist() == [1.0, 1.0], "the row of a single bound, that of the zero token"
    assert moved[1].tolist() == [0.5, 1.0], "the row with another violated bound"


def test_paper_form_leaves_violations_and_breaks_equalities():
    """What 100 draws along raw x_i cost, on the instance that the sound form solves exactly."""
    x, basis, bounds, update = instance(N=400, scale=2.0)
    start = basis.project(update)
    paper = randomized_kaczmarz(start, x, bounds, generator=torch.Generator().manual_seed(0))
    sound = nearest_feasible(update, basis, x, bounds)
    assert violation(paper, x, bounds).max() > 1e-2
    assert violation(sound, x, bounds).max() < 1e-9

    def leak(u):
        return (basis.project(u) - u).norm()

    assert leak(paper) > 0.05 * start.norm()
    assert leak(sound) < 1e-9


def hoffman_constant(x_Nd):
    """The best L with dist(u, S) <= L ||(A u - b)_+|| for every b: the greatest 1 / sigma_min over subsets of rows that
    are independent, by enumeration."""
    count, d = x_Nd.shape
    best = 0.0
    for size in range(1, min(count, d) + 1):
        for rows in itertools.combinations(range(count), size):
            smallest = torch.linalg.svdvals(x_Nd[list(rows)])[-1].item()
            if smallest > 1e-9:
                best = max(best, 1 / smallest)
    return best


@pytest.mark.parametrize("seed", range(3))
def test_kaczmarz_converges_at_the_rate_of_theorem_1(seed):
    """Inequalities alone: the expected squared distance after one draw, exactly over all rows, is at most
    1 - 1 / (L^2 ||A||_F^2) of the one before; and no much better rate could be claimed of all starting points."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    bounds = torch.rand(5, 1, generator=generator, dtype=torch.float64)
    no_basis = RetainStatistics(1, 3).basis(EpsNull(1e-12, "relative"))
    rate = 1 - 1 / (hoffman_constant(x) ** 2 * x.square().sum().item())

    def squared_distance(u_1d):
        return (u_1d - nearest_feasible(u_1d, no_basis, x, bounds, tolerance=1e-12)).square().sum().item()

    ratios = []
    for _ in range(200):
        start = 5 * torch.randn(1, 3, generator=generator, dtype=torch.float64)
        before = squared_distance(start)
        if before < 1e-6:
            continue
        after = 0.0
        for i in range(5):
            moved = randomized_kaczmarz(start, x[i : i + 1], bounds[i : i + 1], max_steps=1, tolerance=0.0)
            after += squared_distance(moved) * (x[i].square().sum() / x.square().sum()).item()
        ratios.append(after / before)
    assert len(ratios) > 50
    assert max(ratios) <= rate + 1e-9
    assert max(ratios) > 0.5 * rate, "the bound says something"


def test_raw_steps_do_not_converge_where_equalities_must_hold_too():
    """The mixed case: one equality and one inequality whose token is not orthogonal to it. Draws along the raw token
    satisfy the inequality and leave the equality behind for good; along the projected token both hold."""
    selected, other = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[1.0, 1.0]]).double()
    basis = (
        RetainStatistics(1, 2).update(selected, torch.ones(1, 1, dtype=torch.bool)).basis(EpsNull(1e-12, "relative"))
    )
    bounds = torch.tensor([[0.5]]).double()
    start = basis.project(torch.tensor([[0.7, 2.0]]).double())
    raw = randomized_kaczmarz(start, other, bounds, max_steps=1000, tolerance=0.0)
    sound = nearest_feasible(start, basis, other, bounds, tolerance=1e-12)
    assert violation(raw, other, bounds).item() < 1e-9
    assert abs((raw @ selected.T).item()) == pytest.approx(0.75)
    assert violation(sound, other, bounds).item() < 1e-9 and abs((sound @ selected.T).item()) < 1e-12
    torch.testing.assert_close(sound, torch.tensor([[0.0, 0.5]]).double())


def test_an_excess_below_the_tolerance_costs_nothing():
    """Beside a violated constraint there is one at a bound of 0, exceeded by less than is looked at."""
    x_Nd = torch.eye(4, dtype=torch.float64)[:2]
    bounds_NE = torch.tensor([[0.1], [0.0]], dtype=torch.float64)
    update_Ed = torch.tensor([[0.3, 5e-7, 0.7, 0.7]], dtype=torch.float64)
    basis = RetainBasis(torch.zeros(1, 4, 1, dtype=torch.float64))
    solved = nearest_feasible(update_Ed, basis, x_Nd, bounds_NE, tolerance=1e-6)
    torch.testing.assert_close(solved, torch.tensor([[0.1, 5e-7, 0.7, 0.7]], dtype=torch.float64))


def test_rounding_at_a_bound_of_zero_does_not_cost_the_row():
    """Solved rows touch their bounds up to 1e-11; shrunk for that, nothing would be left where a bound is 0."""
    generator = torch.Generator().manual_seed(0)
    x_Nd = torch.randn(6, 16, generator=generator, dtype=torch.float64)
    update_Ed = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    basis = RetainBasis(torch.zeros(1, 16, 1, dtype=torch.float64))
    solved = nearest_feasible(update_Ed, basis, x_Nd, torch.zeros(6, 40, dtype=torch.float64))
    reached = x_Nd @ solved.T
    assert 0 < reached.max() < 1e-9, "some touch their bounds from above"
    assert solved.norm(dim=1).min() > 0.1 * update_Ed.norm(dim=1).min()


def test_draws_converge_at_the_rate_of_theorem_c_1():
    """The control: without draws the distance stays, above the bound."""
    rate = kaczmarz_rate(draws=30, walks=400)
    assert all(distance <= bound + 1e-12 for distance, bound in zip(rate["distance"], rate["bound"], strict=True))
    assert rate["distance"][30] < 0.01 * rate["distance"][0] and rate["distance"][0] > 10 * rate["bound"][30]
