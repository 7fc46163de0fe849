"""The constraint's arithmetic by itself, on synthetic layers: how it grows, and what its forms cost against each other.
`pytest -s tests/benchmarks/test_scaling.py`."""

import pytest
import torch

from gripmoe.config.methods import method_table
from gripmoe.constraints.null_space import NullSpaceMinibatch
from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz
from gripmoe.geometry.nullspace import EpsNull, RetainStatistics, covariance_basis
from gripmoe.geometry.routing import SelectionRule, route

SIZE = dict(N=256, d=256, E=32, L=2, k=4)
EPS_NULL = EpsNull(1e-2, "relative")


class Layer:
    """Tokens of a quarter as many directions as dimensions, a router, its bounds and basis, and an update that violates
    a few of them."""

    def __init__(self, N, d, E, k, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x_Nd = torch.randn(N, d // 4, generator=generator) @ torch.randn(d // 4, d, generator=generator) / d**0.5
        self.rule = SelectionRule(k)
        self.theta_Ed = torch.randn(E, d, generator=generator) / d**0.5
        self.update_Ed = 0.1 * torch.randn(E, d, generator=generator) / d**0.5
        self.seen = route(self.x_Nd, self.theta_Ed, self.rule)
        self.fixed_NE = self.rule.fixed(self.seen.scores_NE, self.seen.top_k_Nk)
        margins_NE = self.rule.margins(self.seen.scores_NE, self.seen.top_k_Nk)
        self.bounds_NE = margins_NE.clamp_min(0).masked_fill(self.fixed_NE, torch.inf)
        self.basis = RetainStatistics(E, d).update(self.x_Nd, self.fixed_NE).basis(EPS_NULL)

        assert (self.x_Nd @ self.basis.project(self.update_Ed.double()).float().T > self.bounds_NE).any()

    def constrained(self):
        return nearest_feasible(self.update_Ed, self.basis, self.x_Nd, self.bounds_NE, tolerance=1e-6)


def constrained(N, d, E, L, k):
    layers = [Layer(N, d, E, k, seed) for seed in range(L)]
    return lambda: [layer.constrained() for layer in layers]


@pytest.mark.parametrize("doubled", ["N", "E", "d", "L"])
def test_twice_as_many(doubled, compare):
    compare(f"2 {doubled} against {doubled}", constrained(**SIZE | {doubled: 2 * SIZE[doubled]}), constrained(**SIZE))


@pytest.mark.parametrize("layers", [1, 4, 8])
def test_layers_at_once(layers, compare):
    """Against as many times one layer: what is not arithmetic does not add up."""
    together = constrained(**SIZE | {"L": layers})
    compare(f"{layers} layers, each against one alone", together, constrained(**SIZE | {"L": 1}), per=layers)


def literal_stage_1(layer: Layer) -> torch.Tensor:
    """Algorithm 1, phase 1, expert by expert with its projector written out."""
    rows = []
    for j, update_d in enumerate(layer.update_Ed):
        X_Nd = layer.x_Nd[layer.fixed_NE[:, j]]
        eigenvalues, vectors = torch.linalg.eigh(X_Nd.T @ X_Nd)
        U_dr = vectors[:, eigenvalues >= 1e-2]
        rows.append((torch.eye(len(U_dr)) - U_dr @ U_dr.T) @ update_d)
    return torch.stack(rows)


def literal_stage_2(layer: Layer, update_Ed: torch.Tensor, max_steps: int = 100) -> torch.Tensor:
    """Phase 2, expert by expert and draw by draw."""
    rows = []
    for j, u_d in enumerate(update_Ed.clone()):
        free_N = (~layer.fixed_NE[:, j]).nonzero()[:, 0]
        x_Nd, bounds_N = layer.x_Nd[free_N], layer.bounds_NE[free_N, j]
        if (x_Nd @ u_d - bounds_N).max() > 1e-4:
            norms_N = x_Nd.square().sum(dim=1)
            for i in torch.multinomial(norms_N, max_steps, replacement=True):
                excess = x_Nd[i] @ u_d - bounds_N[i]
                if excess > 0:
                    u_d = u_d - excess / norms_N[i] * x_Nd[i]
        rows.append(u_d)
    return torch.stack(rows)


def test_literal_loop_against_batched(compare):
    """Both phases of the paper's form, as it is written and as it is computed here."""
    layer = Layer(N=256, d=128, E=64, k=4)
    absolute = EpsNull(1e-2, "absolute")

    def batched():
        update_Ed = covariance_basis(layer.x_Nd, layer.fixed_NE, absolute).project(layer.update_Ed)
        return randomized_kaczmarz(update_Ed, layer.x_Nd, layer.bounds_NE)

    torch.testing.assert_close(
        literal_stage_1(layer), covariance_basis(layer.x_Nd, layer.fixed_NE, absolute).project(layer.update_Ed),
        atol=1e-4, rtol=0,
    )  # fmt: skip
    compare("literal loop against batched", lambda: literal_stage_2(layer, literal_stage_1(layer)), batched)


def test_projecting_a_layer_against_expert_by_expert(compare):
    """With bases at hand: one batched product, or a projector formed and applied for each expert."""
    layer = Layer(N=256, d=256, E=64, k=4)
    projectors = [torch.eye(256, dtype=U_dr.dtype) - U_dr @ U_dr.T for U_dr in layer.basis.columns_Edr]
    update_Ed = layer.update_Ed.double()

    def one_by_one():
        return torch.stack([P_dd @ u_d for P_dd, u_d in zip(projectors, update_Ed, strict=True)])

    torch.testing.assert_close(one_by_one(), layer.basis.project(update_Ed))
    compare("expert by expert against batched", one_by_one, lambda: layer.basis.project(update_Ed))


def test_bases_made_at_every_step(compare):
    """Against fixed ones, of the same layer and tokens."""
    layer = Layer(**{name: size for name, size in SIZE.items() if name != "L"})
    constraint = NullSpaceMinibatch(method_table()["expert_specific_minibatch"])
    constraint._rules, constraint._eps_null = {0: layer.rule}, {0: EPS_NULL}
    after_Ed = layer.theta_Ed + layer.update_Ed
    made = lambda: constraint.constrain(0, layer.theta_Ed, after_Ed, layer.seen)  # noqa: E731
    compare("minibatch bases against fixed ones", made, layer.constrained)
