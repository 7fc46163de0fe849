"""Stage 2 against a QP solver (quadprog), family by family of random and degenerate instances, wherever it starts; and
Algorithm 1 where nothing is feasible. `pytest -rP tests/geometry/test_oracle.py` prints the largest residuals."""

import numpy as np
import pytest
import quadprog
import torch
from scipy.optimize import nnls

from gripmoe.geometry import halfspace
from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz, violation
from gripmoe.geometry.nullspace import EpsNull, RetainBasis, RetainStatistics
from gripmoe.geometry.routing import SelectionRule

INSTANCES = 10  # of each family
LARGEST = np.array([1e-12, 1e-13, 1e-13, 1e-13])  # point, distance, equalities, violation


def instance(seed, N=120, d=24, E=8, k=2, num_fixed=40, scale=0.5, change=lambda x, theta: None, margin=1e-3, groups=1):
    """Tokens, the basis of the first `num_fixed` of them, margins less a safety margin, and an update; of several
    `groups` of experts the best half may be selected from."""
    generator = torch.Generator().manual_seed(seed)
    x, theta = (torch.randn(n, d, generator=generator, dtype=torch.float64) for n in (N, E))
    change(x, theta)
    rule = SelectionRule(k, num_groups=groups, chosen_groups=max(1, groups // 2))
    scores = rule.scores(x, theta)
    top_k = rule.select(scores)
    fixed = rule.fixed(scores, top_k)
    basis = RetainStatistics(E, d).update(x[:num_fixed], fixed[:num_fixed]).basis(EpsNull(1e-12, "relative"))
    bounds = (rule.margins(scores, top_k) - margin).masked_fill(fixed, torch.inf)
    return x, basis, bounds, scale * torch.randn(E, d, generator=generator, dtype=torch.float64)


def duplicated(x, theta):
    x[::2] = x[0]


def nearly_parallel(x, theta):
    x[1::2] = x[::2] + 1e-7 * x[1::2]


def tied(x, theta):
    """Two experts have one score each: a margin is 0 wherever only one of them is selected."""
    theta[0] = theta[1]


def some_tokens_zero(x, theta):
    x[::5] = 0


def one_expert_takes_all_and_one_none(x, theta):
    x[:, 0] = x[:, 0].abs() + 1
    theta[0, 0], theta[1, 0] = 1e3, -1e3


def low_rank(x, theta):
    x[:, 6:] = 0


def anisotropic(x, theta):
    x *= torch.logspace(2, -2, x.shape[1], dtype=x.dtype)


FAMILIES = {
    "random": {},
    "large updates": dict(scale=5.0),
    "more dimensions than tokens": dict(N=40, d=60),
    "many more tokens than dimensions": dict(N=1000, d=12, num_fixed=20),
    "duplicates": dict(change=duplicated),
    "nearly parallel tokens": dict(change=nearly_parallel),
    "ties": dict(change=tied, margin=0.0),
    "tokens that are zero": dict(change=some_tokens_zero),
    "empty and full index sets": dict(change=one_expert_takes_all_and_one_none),
    "every expert selected": dict(k=8),
    "no token fixed": dict(num_fixed=0),
    "nothing left free": dict(N=400, num_fixed=400),
    "fewer directions than dimensions": dict(change=low_rank),
    "anisotropic": dict(change=anisotropic),
    "groups": dict(N=40, d=60, num_fixed=20, groups=4),
    "groups, more tokens than dimensions": dict(N=60, d=48, num_fixed=20, groups=4),
    "groups that leave nothing free": dict(N=80, d=16, num_fixed=20, groups=4),
}


def oracle(update_d, U_dr, x_Nd, bounds_N):
    """min ||u - update||^2 s.t. U^T u = 0, x u <= b, with the equalities eliminated."""
    d = len(update_d)
    free = np.linalg.svd(np.eye(d) - U_dr @ U_dr.T)[0][:, : d - np.linalg.matrix_rank(U_dr)] if U_dr.size else np.eye(d)
    finite = np.isfinite(bounds_N)
    if not free.shape[1]:
        return np.zeros(d)
    A = -(x_Nd[finite] @ free)
    keep = np.abs(A).max(axis=1, initial=0) > 1e-12  # a token without a free direction says 0 <= b
    if not keep.any():
        return free @ (free.T @ update_d)
    A, limits, wanted = A[keep], -bounds_N[finite][keep], free.T @ update_d
    try:
        return free @ quadprog.solve_qp(np.eye(free.shape[1]), wanted, A.T, limits)[0]
    except ValueError as error:  # where 0 alone is feasible it may find nothing
        assert "inconsistent" in str(error)
        return free @ least_distance(wanted, A, limits)


def least_distance(wanted, A, limits):
    """min ||u - wanted||^2 s.t. A u >= limits, by nonnegative least squares (Lawson and Hanson, 1974, ch. 23)."""
    E, f = np.vstack([A.T, limits - A @ wanted]), np.r_[np.zeros(len(wanted)), 1.0]
    residual = E @ nnls(E, f)[0] - f
    return wanted - residual[:-1] / residual[-1]


def oracles(basis, x, bounds, update):
    """Row by row."""
    points = []
    for U, bounds_N, update_d in zip(basis.columns_Edr.numpy(), bounds.T.numpy(), update.numpy(), strict=True):
        points.append(oracle(update_d, U[:, np.abs(U).any(axis=0)], x.numpy(), bounds_N))
    return torch.from_numpy(np.stack(points))


def residuals(solved, best, basis, x, bounds, update):
    """Largest over rows: distance to the oracle's point, how much farther from the update than it, equality residual,
    all relative to the update's norm; and the violation, relative to update and token."""
    sizes = update.norm(dim=1)
    away = (solved - best).norm(dim=1) / sizes
    farther = ((solved - update).norm(dim=1) - (best - update).norm(dim=1)) / sizes
    size = sizes.max().item()
    leak = (solved - basis.project(solved)).norm(dim=1).max().item() / size
    return (
        away.max().item(),
        farther.max().item(),
        leak,
        violation(solved, x, bounds).max().item() / (size * x.norm(dim=1).max().item()),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exact_solver_is_the_qp_solver(family):
    """From nowhere, from the solution itself, half of it, the solution of another update, and 0."""
    worst = np.zeros(4)
    touched = 0.0
    for seed in range(INSTANCES):
        x, basis, bounds, update = instance(seed, **FAMILIES[family])
        bounds = bounds.clamp_min(0)
        best = oracles(basis, x, bounds, update)

        def solved(update, near=None, basis=basis, x=x, bounds=bounds):
            return nearest_feasible(update, basis, x, bounds, near_Ed=near, tolerance=1e-12)

        first = solved(update)
        nears = first, first / 2, solved(update.flip(1)), torch.zeros_like(update)
        for point in (first, *(solved(update, near) for near in nears)):
            worst = np.maximum(worst, residuals(point, best, basis, x, bounds, update))
        touched = max(touched, (first - basis.project(update)).norm().item())
    print("{}: point {:.0e}, distance {:.0e}, equalities {:.0e}, violation {:.0e}".format(family, *worst))
    singular = family == "groups that leave nothing free"  # of more tokens at their bounds than there are dimensions
    assert (worst < (10 if singular else 1) * LARGEST).all()
    assert touched > 1e-2 or family in ("every expert selected", "nothing left free"), (
        "the control: Stage 1 is not enough"
    )


def parallel(x, b, U, rng):
    x[1::2] = rng.uniform(0.1, 10, (len(x[1::2]), 1)) * x[::2]


def nearly_equal(x, b, U, rng):
    x[1::2] = x[::2] + 10 ** rng.uniform(-12, -2, (len(x[1::2]), 1)) * x[1::2]


def equalities(x, b, U, rng):
    x[1:8:2], b[:8] = -x[0:8:2], 0


def within_the_span(x, b, U, rng):
    x[::3], b[::3] = rng.normal(size=(len(x[::3]), U.shape[1])) @ U.T, 0


def few_directions(x, b, U, rng):
    rank = max(1, x.shape[1] // 3)
    x[:] = x[:, :rank] @ rng.normal(size=(rank, x.shape[1]))


def norms_of_all_sizes(x, b, U, rng):
    x *= 10 ** rng.uniform(-3, 3, (len(x), 1))


def on_a_grid(x, b, U, rng):
    x[:], b[:] = rng.integers(-1, 2, x.shape), rng.integers(0, 2, b.shape)


def unchanged(x, b, U, rng):
    pass


def equal(x, b, U, rng):
    x[::2] = x[0]


def half_of_the_bounds_zero(x, b, U, rng):
    b[::2] = 0


def all_bounds_zero(x, b, U, rng):
    b[:] = 0


DEGENERATE = (
    unchanged,
    equal,
    half_of_the_bounds_zero,
    all_bounds_zero,
    parallel,
    nearly_equal,
    equalities,
    within_the_span,
    few_directions,
    norms_of_all_sizes,
    on_a_grid,
)


@pytest.mark.parametrize("change", DEGENERATE)
def test_large_updates_among_many_tokens_end_at_the_qp_solvers_distance(change):
    """Updates of all scales, and up to fifty times as many tokens as dimensions: more constraints are violated at once
    than there are dimensions, and their Gram matrix is singular. No row is shrunk."""
    longer, beyond, shrunk = 0.0, 0.0, []
    for d, N in ((4, 8), (4, 200), (16, 160), (16, 800), (64, 128)):
        rng = np.random.default_rng(d + N)
        U, x, b = np.linalg.qr(rng.normal(size=(d, d // 4)))[0], rng.normal(size=(N, d)), np.abs(rng.normal(size=N))
        change(x, b, U, rng)
        basis, bounds_NE = RetainBasis(torch.from_numpy(U)[None]), torch.from_numpy(np.stack([b, b / 10], axis=1))
        for scale in (0.1, 1, 10, 100):
            update_Ed = scale * torch.from_numpy(rng.normal(size=(2, d)))
            solved_Ed = nearest_feasible(
                update_Ed, basis, torch.from_numpy(x), bounds_NE, tolerance=1e-12, on_shrunk=shrunk.append
            )
            for u_d, bounds_N, solved_d in zip(update_Ed.numpy(), bounds_NE.T.numpy(), solved_Ed.numpy(), strict=True):
                best_d = scale * oracle(u_d / scale, U, x, bounds_N / scale)
                ratio = np.linalg.norm(solved_d - u_d) / np.linalg.norm(best_d - u_d)
                reach = np.linalg.norm(u_d) * np.linalg.norm(x, axis=1).clip(1e-9)
                longer = max(longer, ratio - 1)
                beyond = max(beyond, ((x @ solved_d - bounds_N) / reach).max())
    print(f"{change.__name__}: distance {longer:.0e} longer than the QP solver's, violation {beyond:.0e}")
    assert longer < 1e-12 and beyond < 1e-12 and not shrunk


def test_a_first_step_under_group_limits_takes_few_factorizations(monkeypatch):
    """Half of the bounds are 0, and more constraints are violated at once than there are dimensions. Each
    factorization is of a system of equations for every expert."""
    systems, factorize = [], torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda A: systems.append(len(A)) or factorize(A))
    x, basis, bounds, update = instance(0, N=300, d=64, E=16, groups=4)
    bounds = bounds.clamp_min(0)
    solved = nearest_feasible(update, basis, x, bounds)
    print(f"{len(systems)} factorizations")
    assert len(systems) < 1000
    worst = residuals(solved, oracles(basis, x, bounds, update), basis, x, bounds, update)
    assert (np.array(worst) < 1e-9).all()


@pytest.mark.parametrize("norm", [1, 30, 300])
@pytest.mark.parametrize("basis_dtype", [torch.float64, torch.float32], ids=str)
def test_tokens_within_the_span_up_to_fp32_rounding_cost_nothing(norm, basis_dtype):
    """100 tokens of rank 16, at bounds of 0 where they lie within an expert's span and rounding alone exceeds them,
    beside 20 others: the QP without the former is solved, up to what rounding to fp32 makes of scores."""

    def low_rank_in_fp32(x, theta):
        x[:100] = x[:100, :16] @ x[:16] / 4
        x.copy_((norm / 8 * x).float())

    worst, within, touched = np.zeros(4), 0.0, 0.0
    for seed in range(INSTANCES):
        x, basis, bounds, update = instance(seed, d=64, num_fixed=100, change=low_rank_in_fp32)
        in_span = torch.stack([basis.project(x_d.expand(8, -1)).norm(dim=1) < 1e-6 * x_d.norm() for x_d in x])
        stage_1 = basis.project(update)
        others = bounds.clamp_min(0).masked_fill(in_span, torch.inf)
        bounds = others.masked_fill(in_span & bounds.isfinite(), 0)
        within = max(within, violation(stage_1, x, bounds.masked_fill(~in_span, torch.inf)).max().item())
        solved = nearest_feasible(
            update, RetainBasis(basis.columns_Edr.to(basis_dtype)), x.float(), bounds.float(), tolerance=1e-6
        )
        assert violation(solved, x, bounds).max() < 1e-6 * norm * update.norm(dim=1).max()
        best = oracles(basis, x / norm, others / norm, update)
        worst = np.maximum(worst, residuals(solved, best, basis, x / norm, others / norm, update))
        touched = max(touched, (solved - stage_1).norm().item())
    print("{} {}: point {:.0e}, distance {:.0e}, equalities {:.0e}, violation {:.0e}".format(norm, basis_dtype, *worst))
    assert (worst < 1e-6).all()
    assert within > 1e-8 * norm and touched > 1e-2, "the controls: bounds within the span are exceeded, others bind"


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_fp32_products_that_are_rounded_to_less_are_not_relied_on(precision, monkeypatch):
    """As GPUs do where TF32 is allowed, emulated. The control: where torch is not told of it, what lies at its bound
    seems to exceed it, and rows with a bound of 0 are shrunk to nothing."""
    x, basis, bounds, update = instance(0, d=64, num_fixed=20)
    bounds = bounds.clamp_min(0)
    bounds[::4] = torch.where(bounds[::4].isfinite(), 0, bounds[::4])
    inputs = update.float(), basis, x.float(), bounds.float()
    exact = nearest_feasible(*inputs, tolerance=1e-6)

    def rounded(update_Ed, x_Nd):
        update_Ed = update_Ed.to(x_Nd.dtype)
        if x_Nd.dtype == torch.float32:
            update_Ed, x_Nd = update_Ed.bfloat16().float(), x_Nd.bfloat16().float()
        return update_Ed @ x_Nd.T

    monkeypatch.setattr(halfspace, "_scores", rounded)
    with pytest.warns(UserWarning, match="shrunk towards 0"):
        assert (nearest_feasible(*inputs, tolerance=1e-6) == 0).all(dim=1).any(), "the control"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        torch.testing.assert_close(nearest_feasible(*inputs, tolerance=1e-6), exact, rtol=0, atol=1e-6)
    finally:
        torch.set_float32_matmul_precision(before)


def feasible(basis_dr, x_Nd, bounds_N):
    finite = np.isfinite(bounds_N)
    rows, limits = np.vstack([basis_dr.T, -x_Nd[finite]]), np.r_[np.zeros(basis_dr.shape[1]), -bounds_N[finite]]
    try:
        quadprog.solve_qp(np.eye(x_Nd.shape[1]), np.zeros(x_Nd.shape[1]), rows.T, limits, meq=basis_dr.shape[1])
    except ValueError as error:
        assert "inconsistent" in str(error)
        return False
    return True


@pytest.mark.parametrize("seed", range(5))
def test_margins_spent_afresh_may_be_infeasible(seed):
    """Unclamped, a margin below the safety margin is a negative bound, and where the tokens that an expert serves leave
    it no direction to fall along, no point respects it. Algorithm 1 then moves a router that the optimizer left alone,
    breaks its equalities and leaves violations; clamped, the system is feasible and the router stays put."""
    x, basis, bounds, _ = instance(seed, N=200, num_fixed=200, margin=0.5)
    systems = [(U_dr.numpy(), bounds_N.numpy()) for U_dr, bounds_N in zip(basis.columns_Edr, bounds.T, strict=True)]
    assert not any(feasible(U_dr, x.numpy(), bounds_N) for U_dr, bounds_N in systems)
    assert all(feasible(U_dr, x.numpy(), bounds_N.clip(0)) for U_dr, bounds_N in systems), "the control"
    still = torch.zeros(8, 24, dtype=torch.float64)
    paper = randomized_kaczmarz(still, x, bounds, generator=torch.Generator().manual_seed(seed))
    leak, left = (paper - basis.project(paper)).norm(dim=1).max(), violation(paper, x, bounds).max()
    print(
        f"infeasible: Algorithm 1 moves by {paper.norm():.2f}, of it {leak:.2f} in the span, and violates by {left:.2f}"
    )
    assert paper.isfinite().all() and leak > 1e-2 and left > 0.1
    assert nearest_feasible(still, basis, x, bounds.clamp_min(0)).norm() == 0


def test_the_degenerate_families_are_what_they_say():
    _, basis, bounds, _ = instance(0, **FAMILIES["empty and full index sets"])
    assert bounds[:, 0].isinf().all() and bounds[:, 1].isfinite().all() and basis.ranks[1] == 0
    assert (instance(0, **FAMILIES["ties"])[2] == 0).sum() > 10
    assert (instance(0, **FAMILIES["nothing left free"])[1].ranks == 24).all()
    for family in ("groups", "groups, more tokens than dimensions", "groups that leave nothing free"):
        bounds = instance(0, **FAMILIES[family])[2].clamp_min(0)
        assert 0.3 < (bounds == 0).double().mean() < 0.6 and (bounds.isfinite() & (bounds > 0)).any()
