"""Method A: how far a router row may move, so that its selections of retain tokens stay (Sec. 4).

`NullSpace` is the sound form, `NullSpacePaper` the paper's, `NullSpaceMinibatch` between them. N tokens, d hidden size,
E experts, k experts per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gripmoe.config.methods import EpsNullConfig, Method
from gripmoe.constraints.base import RouterConstraint
from gripmoe.geometry.halfspace import in_full_precision, nearest_feasible, randomized_kaczmarz
from gripmoe.geometry.nullspace import EpsNull, RetainBasis, RetainStatistics, covariance_basis, extended
from gripmoe.geometry.routing import LayerRouting, RoutingTrace, SelectionRule, route
from gripmoe.geometry.screening import ScreenedProjection


class _Reporting(RouterConstraint):
    """What forms of Method A report of their projections. `stage_2_rate` and ranks are of every tenth, because to
    measure them costs another projection; `rows_shrunk` is of the last."""

    def __init__(self) -> None:
        self._calls: Counter[int] = Counter()
        self._beyond: dict[int, float] = {}
        self._ranks: dict[int, float] = {}
        self._shrunk: dict[int, int] = {}

    def _shrinks(self, layer: int) -> Callable[[int], None]:
        """Sets the layer's number of shrunk rows to 0; the function that it returns sets another number."""
        self._shrunk[layer] = 0
        return partial(self._shrunk.__setitem__, layer)

    def _observe(self, layer: int, basis: RetainBasis, update_Ed: Tensor, feasible_Ed: Tensor) -> None:
        self._calls[layer] += 1
        if self._calls[layer] % 10 == 1:
            stage_1_Ed = basis.project(update_Ed.to(basis.columns_Edr))
            moved_E = (feasible_Ed - stage_1_Ed).norm(dim=1) > 1e-4 * stage_1_Ed.norm(dim=1)  # not by rounding
            self._beyond[layer], self._ranks[layer] = (v.double().mean().item() for v in (moved_E, basis.ranks))

    def observed(self) -> dict[str, float]:
        """`stage_2_rate`, the share of router rows that Stage 1 alone leaves beyond a margin; `rank_layer_<l>`, the
        mean rank of a basis; `rows_shrunk`, the router rows of the last projection for which Stage 2 found no
        nearest point (absent in the paper's form)."""
        if not self._beyond:
            return {}
        rate = sum(self._beyond.values()) / len(self._beyond)
        ranks = {f"rank_layer_{layer}": rank for layer, rank in self._ranks.items()}
        shrunk = {"rows_shrunk": float(sum(self._shrunk.values()))} if self._shrunk else {}
        return {"stage_2_rate": rate} | ranks | shrunk

    def state(self) -> dict:
        return {"observed": (dict(self._calls), dict(self._beyond), dict(self._ranks), dict(self._shrunk))}

    def load_state(self, state: dict) -> None:
        calls, self._beyond, self._ranks, self._shrunk = state["observed"]
        self._calls = Counter(calls)


class NullSpace(_Reporting):
    """Method A, the sound form: selections on the *original* retain representations stay.

    D is a router's displacement since the start; x_0 and tau_0 are the inputs and margins of the original model's
    retain tokens, recorded once. D_j x_0 = 0 for the tokens that select expert j, up to the directions that `eps_null`
    leaves free; D_j x_0 <= max(tau_0 - safety_margin, 0) for all others (Eq. 3). This polyhedron is fixed, contains
    D = 0 and needs nothing of the current forward pass. After each step D is replaced by the nearest point in it, so
    what the optimizer adds (momentum, weight decay) is constrained too. With `every` = n that happens at every n-th
    step, and D may be outside in between.
    """

    def __init__(
        self, trace: RoutingTrace, bases: Mapping[int, RetainBasis], safety_margin: float = 1e-3, every: int = 1
    ):
        super().__init__()
        self.trace = trace
        self.bases = bases
        self.safety_margin = safety_margin
        self.every = every

    def start(self, model, retain) -> None:
        model.freeze_router_biases()
        self._theta_0 = model.thetas()
        # Converted once: `nearest_feasible` would convert them at every step.
        if model.model.device.type == "cpu" and getattr(self.bases, "in_memory", True):
            self.bases = {layer: self.bases[layer].double().narrow() for layer in self.trace}
        self._projections = {}
        for layer, recorded in self.trace.items():
            seen = recorded.to(model.model.device)
            bounds_NE = sound_bounds(seen, model.rule(layer), self.safety_margin)
            self._projections[layer] = ScreenedProjection(self.bases[layer], seen.x_Nd, bounds_NE)
        del self.trace  # may be large

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        theta_0, basis = self._theta_0[layer], self.bases[layer]
        displacement_Ed = self._projections[layer](
            after_Ed - theta_0, basis, before_Ed - theta_0, tolerance=1e-6, on_shrunk=self._shrinks(layer)
        )
        self._observe(layer, basis, after_Ed - theta_0, displacement_Ed)
        return theta_0 + displacement_Ed

    def state(self) -> dict:
        return {**super().state(), "looked": {n: each.looked_from for n, each in self._projections.items()}}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        for layer, looked in state.get("looked", {}).items():
            if looked:
                self._projections[layer].look(*looked)


class NullSpaceReparameterized(RouterConstraint):
    """Theta = Theta_0 + P (W - Theta_0) with a free W (Eq. 14, App. B.2). The gradient and the update of Theta are
    projected, which is the same as training W without weight decay. This is Stage 1 alone."""

    of_gradient = True

    def __init__(self, bases: Mapping[int, RetainBasis]):
        self.bases = bases

    def start(self, model, retain) -> None:
        model.freeze_router_biases()

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        basis = self.bases[layer].double()  # or what is left of small gradients is rounding
        return before_Ed + basis.project(after_Ed.double() - before_Ed)


class NullSpaceMinibatch(_Reporting):
    """Method A against the current retain minibatch, soundly: the optimizer's own update is replaced by the nearest one
    that changes no set which the router of the step before selects for these tokens. Other tokens are free."""

    watches = frozenset({"retain"})
    collects = True

    def __init__(self, method: Method):
        super().__init__()
        self.method = method

    def start(self, model, retain) -> None:
        model.freeze_router_biases()
        self._rules = model.rules()
        self._eps_null = eps_by_layer(self.method.eps_null, model.layers)

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        method, rule = self.method, self._rules[layer]
        current = route(seen.x_Nd, before_Ed, rule)
        basis = _fitted_basis(current, rule, self._eps_null[layer], method)
        bounds_NE = sound_bounds(current, rule, method.safety_margin)
        options = dict(tolerance=1e-6, on_shrunk=self._shrinks(layer))
        update_Ed = nearest_feasible(after_Ed - before_Ed, basis, seen.x_Nd, bounds_NE, **options)
        self._observe(layer, basis, after_Ed - before_Ed, update_Ed)
        return before_Ed + update_Ed


class NullSpacePaper(_Reporting):
    """Method A in the paper's form (Alg. 1, App. B-D): the update of each step, projected with the current minibatch.

    Bases come from the minibatch (`covariance_basis`, with an absolute eps_null), or with `basis: cached` from
    the original model's retain tokens, once, and grow by the directions of each minibatch; margins are those of the
    original router on the current representations, spent afresh at every step; Stage 2 is randomized Kaczmarz. With
    `projects: gradient` the gradient is projected before the optimizer sees it (App. D's hook); momentum and weight
    decay then leave the null space again.
    """

    collects = True

    def __init__(self, method: Method, seed: int = 0, bases: Mapping[int, RetainBasis] | None = None):
        super().__init__()
        self.method, self.seed, self.bases = method, seed, bases
        self._cached: dict[int, Tensor] = {}
        self.watches = method.sides
        self.of_gradient = method.projects == "gradient"
        self.of_update = not self.of_gradient

    def start(self, model, retain) -> None:
        model.freeze_router_biases()
        self.generator = torch.Generator(model.model.device).manual_seed(self.seed)
        self._theta_0 = model.thetas()
        self._rules = model.rules()
        self._eps_null = eps_by_layer(self.method.eps_null, model.layers)

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        x_Nd = in_full_precision(seen.x_Nd)  # and with it all that follows
        original = route(x_Nd, self._theta_0[layer].to(x_Nd), self._rules[layer])
        update_Ed = (after_Ed - before_Ed).to(x_Nd)
        basis = self._minibatch_basis(layer, original)
        feasible_Ed = paper_update(update_Ed, basis, original, self._rules[layer], self.method, self.generator)
        self._observe(layer, basis, update_Ed, feasible_Ed)
        return before_Ed + feasible_Ed

    def _minibatch_basis(self, layer: int, seen: LayerRouting) -> RetainBasis:
        eps_null, fixed_NE = self._eps_null[layer], _fixed(seen, self._rules[layer], self.method)
        if self.method.basis != "cached":
            return covariance_basis(seen.x_Nd, fixed_NE, eps_null)
        before_Edr = self._cached[layer] if layer in self._cached else self.bases[layer].columns_Edr
        basis = extended(RetainBasis(before_Edr.to(seen.x_Nd)), seen.x_Nd, fixed_NE, eps_null)
        self._cached[layer] = basis.columns_Edr
        return basis

    def state(self) -> dict:
        return {**super().state(), "generator": self.generator.get_state(), "cached": dict(self._cached)}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        self.generator.set_state(state["generator"].cpu())
        self._cached = {layer: U_Edr.to(self._theta_0[layer].device) for layer, U_Edr in state["cached"].items()}


def paper_update(
    update_Ed: Tensor,
    basis: RetainBasis,
    seen: LayerRouting,
    rule: SelectionRule,
    method: Method,
    generator: torch.Generator,
) -> Tensor:
    """Both phases of Algorithm 1, in the dtype of `seen.x_Nd` (`in_full_precision`), of which `update_Ed` and the basis
    are too; with `granularity: layer` only the first, which fixes every score."""
    stage_1_Ed = basis.project(update_Ed)
    if method.granularity == "layer":
        return stage_1_Ed
    bounds_NE = bounds(seen, rule, method.safety_margin)
    if method.projects == "gradient":
        # A negative bound asks for a move as large as the violation, which divided by the rate is a huge gradient.
        bounds_NE = bounds_NE.clamp_min(0)
    return randomized_kaczmarz(
        stage_1_Ed,
        seen.x_Nd,
        bounds_NE,
        max_steps=method.kaczmarz_steps,
        tolerance=method.kaczmarz_tolerance,
        generator=generator,
    )


def feasible_router(
    method: Method, theta_0_Ed: Tensor, theta_Ed: Tensor, seen: LayerRouting, rule: SelectionRule
) -> Tensor:
    """The original router plus what Method A leaves of the whole displacement from it: what Method B falls back to
    (Sec. 4.3, App. D). `seen` is how the original router routes: inputs of the unlearned model in the paper's form, of
    the original model in the sound one."""
    update_Ed = theta_Ed - theta_0_Ed
    eps_null = EpsNull(method.eps_null.value, method.eps_null.kind)
    if method.form == "paper":
        generator = torch.Generator(seen.x_Nd.device).manual_seed(0)
        seen = replace(seen, x_Nd=in_full_precision(seen.x_Nd))
        basis = covariance_basis(seen.x_Nd, _fixed(seen, rule, method), eps_null)
        return theta_0_Ed + paper_update(update_Ed.to(seen.x_Nd), basis, seen, rule, method, generator)
    basis = _fitted_basis(seen, rule, eps_null, method)
    bounds_NE = sound_bounds(seen, rule, method.safety_margin)
    return theta_0_Ed + nearest_feasible(update_Ed, basis, seen.x_Nd, bounds_NE, tolerance=1e-6)


def null_space_of(
    method: Method, trace: RoutingTrace, bases: Mapping[int, RetainBasis] | None, seed: int
) -> NullSpace | NullSpaceReparameterized | NullSpaceMinibatch | NullSpacePaper:
    """The form that a row of methods.yaml asks for; `bases` where it has fixed ones."""
    if method.form == "paper":
        return NullSpacePaper(method, seed, bases)
    if method.projects == "both":
        return NullSpaceReparameterized(bases)
    if method.has_bases:
        return NullSpace(trace, bases, method.safety_margin, method.every)
    return NullSpaceMinibatch(method)


def constrained_trace(method: Method, retain: RoutingTrace, forget: RoutingTrace) -> RoutingTrace:
    """The tokens whose routing a null space fixes: retain tokens, or as the method's `surface` says (App. G.3)."""
    if method.surface == "combined":
        return {layer: LayerRouting.joined([retain[layer], forget[layer]]) for layer in retain}
    return forget if method.surface == "forget" else retain


def fit_bases(trace: RoutingTrace, rules: Mapping[int, SelectionRule], method: Method) -> dict[int, RetainBasis]:
    """The retain basis of each layer of a trace, per expert or, with granularity "layer", of all tokens for all experts
    (the full null space, Sec. 4.1)."""
    eps_null = eps_by_layer(method.eps_null, list(trace))
    return {layer: _fitted_basis(seen, rules[layer], eps_null[layer], method) for layer, seen in trace.items()}


def eps_by_layer(config: EpsNullConfig, layers: Sequence[int]) -> dict[int, EpsNull]:
    """The threshold of each MoE layer; `config.bands` may give the early, middle and late thirds their own."""
    names = ("early", "middle", "late")
    return {
        layer: EpsNull(config.bands.get(names[3 * number // len(layers)], config.value), config.kind)
        for number, layer in enumerate(layers)
    }


def bounds(seen: LayerRouting, rule: SelectionRule, safety_margin: float) -> Tensor:
    """How much each score may rise; infinity for those that Stage 1 fixes."""
    fixed_NE = rule.fixed(seen.scores_NE, seen.top_k_Nk)
    return (rule.margins(seen.scores_NE, seen.top_k_Nk) - safety_margin).masked_fill(fixed_NE, torch.inf)


def sound_bounds(seen: LayerRouting, rule: SelectionRule, safety_margin: float) -> Tensor:
    """`bounds`, at least 0: a router that does not move is feasible."""
    return bounds(seen, rule, safety_margin).clamp_min(0)


def _fixed(seen: LayerRouting, rule: SelectionRule, method: Method) -> Tensor:
    """The scores that must not change, (N, E), or (N, 1) where all experts share a basis of all tokens."""
    fixed_NE = rule.fixed(seen.scores_NE, seen.top_k_Nk)
    return torch.ones_like(fixed_NE[:, :1]) if method.granularity == "layer" else fixed_NE


def _fitted_basis(seen: LayerRouting, rule: SelectionRule, eps_null: EpsNull, method: Method) -> RetainBasis:
    """The directions of the tokens seen that Stage 1 fixes."""
    fixed_NE = _fixed(seen, rule, method)
    hidden_size, experts = seen.x_Nd.shape[1], fixed_NE.shape[1]
    statistics = RetainStatistics(experts, hidden_size, method.max_rank)
    at_once = max(1024, hidden_size * experts // (4 * seen.top_k_Nk.shape[1]))  # tokens that fill factors of d rows
    for start in range(0, len(seen), at_once):
        statistics.update(seen.x_Nd[start : start + at_once], fixed_NE[start : start + at_once])
    return RetainBasis(statistics.basis(eps_null).columns_Edr.float())
