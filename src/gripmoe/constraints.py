"""When may a router row move, and how far: Method A and its controls, as hooks on anybody's optimizer.

N retain tokens, d hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gripmoe.config import Method
from gripmoe.data.documents import Batch
from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz
from gripmoe.geometry.nullspace import EpsNull, RetainBasis, RetainStatistics, covariance_basis
from gripmoe.geometry.routing import LayerRouting, RoutingTrace, route, selection_margins, selection_mask
from gripmoe.moe import MoEModel
from gripmoe.moe.model import attention_mask_of, routed_tokens


class RouterConstraint(Protocol):
    """Decides what stands of an optimizer step on the routers; `needs_retain` if it looks at the retain forward."""

    needs_retain: bool

    def start(self, model: MoEModel) -> None: ...

    def constrain(self, layer: int, before_Ed: Tensor, after_Ed: Tensor, seen: LayerRouting | None) -> Tensor:
        """The router that may stand, given the one before and the one after the optimizer's step."""
        ...

    def state(self) -> dict:
        """What a resumed run needs beyond the model and the optimizer."""
        ...

    def load_state(self, state: dict) -> None: ...


class Unconstrained:
    """No constraint: the router goes where the optimizer puts it. The others build on it."""

    needs_retain = False

    def start(self, model: MoEModel) -> None:
        pass

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        return after_Ed

    def state(self) -> dict:
        return {}

    def load_state(self, state: dict) -> None:
        pass


class FrozenRouter(Unconstrained):
    """Theta never changes. Routing decisions still do, where upstream experts move the router's inputs (App. F.1)."""

    def start(self, model: MoEModel) -> None:
        for layer in model.layers:
            model.theta(layer).requires_grad_(False)

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        return before_Ed


class NullSpace(Unconstrained):
    """Method A, the sound form: selections on the *original* retain representations never change.

    With D the router's displacement since the start, x_0, S_0 and tau_0 recorded once from the original model: D_j
    x_0 = 0 for the tokens that select j, D_j x_0 <= max(tau_0 - safety_margin, 0) for all others (Eq. 3). This
    polyhedron is fixed, contains D = 0, and needs nothing of the current forward pass. After each step D is replaced
    by the nearest point in it, so what the optimizer adds (momentum, weight decay) is constrained too.
    """

    def __init__(self, reference: RoutingTrace, bases: dict[int, RetainBasis], safety_margin: float = 1e-3):
        self.reference = reference
        self.bases = {layer: RetainBasis(basis.U_ret_Edr.double()) for layer, basis in bases.items()}
        self.safety_margin = safety_margin

    def start(self, model: MoEModel) -> None:
        self._theta_0 = model.thetas()
        self._x_Nd, self._bounds_NE = {}, {}
        for layer, seen in self.reference.items():
            self._x_Nd[layer] = seen.x_Nd.double()
            selected_NE = selection_mask(seen.top_k_Nk, model.num_experts)
            bounds_NE = (selection_margins(seen.scores_NE, selected_NE) - self.safety_margin).clamp_min(0)
            self._bounds_NE[layer] = bounds_NE.masked_fill(selected_NE, torch.inf).double()

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        theta_0 = self._theta_0[layer]
        displacement_Ed = nearest_feasible(
            after_Ed - theta_0,
            self.bases[layer],
            self._x_Nd[layer],
            self._bounds_NE[layer],
            near_Ed=before_Ed - theta_0,
            tolerance=1e-6,
        )
        return theta_0 + displacement_Ed


class NullSpacePaper(Unconstrained):
    """Method A to the letter (Alg. 1, App. B-D): the update of each step, projected with the current retain minibatch.

    Bases come from the minibatch by eigendecomposition in fp32 with an absolute eps_null; margins are those of the
    original router on the current representations, spent afresh at every step; Stage 2 is randomized Kaczmarz.
    """

    needs_retain = True

    def __init__(
        self,
        eps_null: EpsNull,
        *,
        safety_margin: float = 1e-3,
        max_steps: int = 100,
        tolerance: float = 1e-4,
        seed: int = 0,
    ):
        self.eps_null = eps_null
        self.safety_margin = safety_margin
        self.max_steps = max_steps
        self.tolerance = tolerance
        self.seed = seed

    def start(self, model: MoEModel) -> None:
        self.generator = torch.Generator(model.model.device).manual_seed(self.seed)
        self._theta_0 = model.thetas()
        self._top_k, self._num_experts = model.top_k, model.num_experts

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        original = route(seen.x_Nd, self._theta_0[layer], self._top_k)
        selected_NE = selection_mask(original.top_k_Nk, self._num_experts)
        update_Ed = covariance_basis(seen.x_Nd, selected_NE, self.eps_null).project(after_Ed - before_Ed)
        bounds_NE = selection_margins(original.scores_NE, selected_NE) - self.safety_margin
        update_Ed = randomized_kaczmarz(
            update_Ed,
            seen.x_Nd,
            bounds_NE.masked_fill(selected_NE, torch.inf),
            max_steps=self.max_steps,
            tolerance=self.tolerance,
            generator=self.generator,
        )
        return before_Ed + update_Ed

    def state(self) -> dict:
        return {"generator": self.generator.get_state()}

    def load_state(self, state: dict) -> None:
        if state:
            self.generator.set_state(state["generator"])


class RouterGuard:
    """Holds a constraint over an optimizer until closed: it snapshots the routers before each step and writes back what
    the constraint lets stand. Nothing else in the training loop changes."""

    def __init__(self, model: MoEModel, optimizer: torch.optim.Optimizer, constraint: RouterConstraint):
        self.model = model
        self.constraint = constraint
        self._seen: RoutingTrace | None = None
        self._before: dict[int, Tensor] = {}
        constraint.start(model)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @contextmanager
    def retain(self) -> Iterator[None]:
        """Marks the forward pass of retain data; methods that look at it need it before every step."""
        if not self.constraint.needs_retain:
            yield
            return
        masks: list[Tensor] = []

        def read_mask(module, args, kwargs):
            masks.append(attention_mask_of(kwargs))

        handle = self.model.model.model.register_forward_pre_hook(read_mask, with_kwargs=True)
        try:
            with self.model.record_routing() as recorder:
                yield
                keep = torch.cat([routed_tokens(mask) for mask in masks])
                self._seen = {
                    layer: LayerRouting(r.x_Nd.detach(), r.scores_NE.detach(), r.top_k_Nk)
                    for layer, r in recorder.take(keep).items()
                }
        finally:
            handle.remove()

    def _before_step(self, *_) -> None:
        self._before = self.model.thetas()

    @torch.no_grad()
    def _after_step(self, *_) -> None:
        if self.constraint.needs_retain and self._seen is None:
            raise RuntimeError("this constraint looks at the retain forward: run it within `with guard.retain():`")
        for layer, before_Ed in self._before.items():
            theta = self.model.theta(layer)
            seen = self._seen[layer] if self._seen else None
            theta.copy_(self.constraint.constrain(layer, before_Ed, theta.detach().clone(), seen))
        self._seen = None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> RouterGuard:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def make_constraint(
    method: Method, reference: RoutingTrace, bases: dict[int, RetainBasis] | None, seed: int
) -> RouterConstraint:
    """The constraint of a row of methods.yaml; `bases` where it has fixed ones."""
    if method.constraint == "none":
        return Unconstrained()
    if method.constraint == "frozen":
        return FrozenRouter()
    if method.form == "sound":
        return NullSpace(reference, bases, method.safety_margin)
    eps_null = EpsNull(method.eps_null.value, method.eps_null.kind)
    return NullSpacePaper(eps_null, safety_margin=method.safety_margin, seed=seed)


def fit_bases(
    reference: RoutingTrace, num_experts: int, eps_null: EpsNull, granularity: str, max_rank: int | None = None
) -> dict[int, RetainBasis]:
    """The retain basis of each layer of a trace, per expert or, with granularity "layer", of all tokens for all
    experts (the full null space, Sec. 4.1)."""
    bases = {}
    for layer, seen in reference.items():
        selected_NE = selection_mask(seen.top_k_Nk, num_experts)
        if granularity == "layer":
            selected_NE = torch.ones_like(selected_NE[:, :1])
        statistics = RetainStatistics(selected_NE.shape[1], seen.x_Nd.shape[1], max_rank)
        for start in range(0, len(seen), 1024):
            statistics.update(seen.x_Nd[start : start + 1024], selected_NE[start : start + 1024])
        bases[layer] = RetainBasis(statistics.basis(eps_null).U_ret_Edr.float())
    return bases


def constrain(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    retain: Iterable[Batch | Mapping[str, Tensor]],
    *,
    granularity: str = "expert",
    eps_null: EpsNull | None = None,
    safety_margin: float = 1e-3,
) -> RouterGuard:
    """Method A, in its sound form, on any training loop: from now on the optimizer cannot change which experts the
    original router selects for the `retain` batches (Eq. 3).

    `model` is a transformers MoE model of a known family, `optimizer` holds its routers among others, `retain` are
    batches of input_ids and attention_mask. Their routing is recorded once, here. Close the guard, or use it as a
    context manager, to lift the constraint.
    """
    moe = MoEModel(model)
    reference = moe.trace(retain)
    bases = fit_bases(reference, moe.num_experts, eps_null or EpsNull(1e-4, "relative"), granularity)
    return RouterGuard(moe, optimizer, NullSpace(reference, bases, safety_margin))
