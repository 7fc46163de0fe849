"""What a constraint on routers is, and the two that take no arithmetic: none, and frozen routers.

Method A is in `null_space`; `anchor` and `baselines` add to the loss. N tokens, d hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gripmoe.data.documents import Batch
from gripmoe.geometry.routing import LayerRouting, RoutingTrace
from gripmoe.moe import MoEModel


@dataclass(frozen=True)
class Tokens:
    """The inputs of a marked forward pass, (rows, positions), and which of their tokens count, (T,): no padding, not
    the first of a row."""

    input_ids: Tensor
    attention_mask: Tensor
    keep: Tensor


@dataclass(frozen=True)
class Seen:
    """A marked forward pass, with its graph: routing and final normed hidden states of the tokens that count."""

    routing: RoutingTrace
    hidden_Nd: Tensor
    tokens: Tokens


class RouterConstraint(Protocol):
    """Decides what stands of an optimizer step on the routers, or what is added to the loss.

    `watches` names the forward passes ("retain", "forget") for which `penalty` is asked; `needs_retain` says that
    `constrain` looks at the retain forward of its step, `needs_graph` that `penalty` has a gradient through what
    routers saw, `of_gradient` that `constrain` is asked of a plain gradient step before the optimizer makes its own of
    it, and of nothing after, `refits` that `refit` gives the routers of a retain forward.
    """

    watches: frozenset[str]
    needs_retain: bool
    needs_graph: bool
    of_gradient: bool
    refits: bool
    original: MoEModel | None  # a second model, to ask where otherwise answers of the first are kept from `start` on

    def start(self, model: MoEModel, forget: Sequence[Batch], retain: Sequence[Batch]) -> None:
        """Sees the model before unlearning, and the documents that training will use."""
        ...

    def constrain(self, layer: int, before_Ed: Tensor, after_Ed: Tensor, seen: LayerRouting | None) -> Tensor:
        """The router that may stand, given the one before and the one after the optimizer's step."""
        ...

    def penalty(self, kind: str, seen: Seen) -> Tensor: ...

    def refit(self, layer: int, x_Nd: Tensor, tokens: Tokens) -> Tensor:
        """The router, (E, d), with which the pass goes on where it has come to this layer; layers come in order."""
        ...

    def observed(self) -> dict[str, float]:
        """Numbers about the last steps, for the history of a run."""
        ...

    def state(self) -> dict:
        """What a resumed run needs beyond the model and the optimizer."""
        ...

    def load_state(self, state: dict) -> None: ...


class Unconstrained:
    """No constraint: the router goes where the optimizer puts it. The others build on it."""

    watches: frozenset[str] = frozenset()
    needs_retain = False
    needs_graph = False
    of_gradient = False
    refits = False
    original: MoEModel | None = None

    def start(self, model: MoEModel, forget: Sequence[Batch], retain: Sequence[Batch]) -> None:
        pass

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        return after_Ed

    def penalty(self, kind, seen) -> Tensor | float:
        return 0.0

    def refit(self, layer, x_Nd, tokens) -> Tensor:
        raise NotImplementedError("asked only of a constraint that refits")

    def observed(self) -> dict[str, float]:
        return {}

    def state(self) -> dict:
        return {}

    def load_state(self, state: dict) -> None:
        pass


class FrozenRouter(Unconstrained):
    """Theta never changes. Routing decisions still do, where upstream experts move the router's inputs (App. G.1)."""

    def start(self, model, forget, retain) -> None:
        model.freeze_router_biases()
        for layer in model.layers:
            model.theta(layer).requires_grad_(False)

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        return before_Ed
