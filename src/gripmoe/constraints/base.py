"""What a constraint on routers is, and the two without arithmetic: none, and frozen routers.

N tokens that count, T all tokens of a pass, d hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gripmoe.data.documents import Batch
from gripmoe.geometry.routing import LayerRouting, RoutingTrace
from gripmoe.moe import MoEModel


@dataclass(frozen=True)
class Tokens:
    """The inputs of a marked forward pass, (rows, positions), and which of their tokens count, (T,): neither padding
    nor the first of a row."""

    input_ids: Tensor
    attention_mask: Tensor
    keep: Tensor


@dataclass(frozen=True)
class Seen:
    """A marked forward pass, with its graph: routing and final normed hidden states of the tokens that count."""

    routing: RoutingTrace
    hidden_Nd: Tensor
    tokens: Tokens


class RouterConstraint:
    """Replaces the routers that an optimizer step makes by feasible ones, or adds to the loss. By default neither."""

    watches: frozenset[str] = frozenset()  # the forward passes, "retain" or "forget", for which `penalty` is called
    collects: frozenset[str] = frozenset()  # those whose tokens `constrain` is given, all together
    needs_graph = False  # `penalty` has a gradient through what routers saw
    of_gradient = False  # `constrain` is called with a plain gradient step, before the optimizer's
    of_update = True  # ... and with what the optimizer made
    refits = False  # `refit` gives the routers of a retain forward
    original: MoEModel | None = None  # a copy to ask; without it, answers about retain documents are kept at `start`

    def start(self, model: MoEModel, forget: Sequence[Batch], retain: Sequence[Batch]) -> None:
        """Called with the model before unlearning, and the documents that training will use."""

    def constrain(self, layer: int, before_Ed: Tensor, after_Ed: Tensor, seen: LayerRouting | None) -> Tensor:
        """The feasible router, given the one before and the one after the optimizer's step."""
        return after_Ed

    def penalty(self, kind: str, seen: Seen) -> Tensor | float:
        return 0.0

    def refit(self, layer: int, x_Nd: Tensor, tokens: Tokens) -> Tensor:
        """The router, (E, d), that this layer uses in the pass under way; layers come in order."""
        raise NotImplementedError

    def observed(self) -> dict[str, float]:
        """Numbers about the last steps, for the history of a run."""
        return {}

    def state(self) -> dict:
        """What a resumed run needs beyond the model and the optimizer."""
        return {}

    def load_state(self, state: dict) -> None:
        pass


class Unconstrained(RouterConstraint):
    """No constraint."""


class FrozenRouter(RouterConstraint):
    """Theta never changes. Routing decisions still do, where upstream experts move the router's inputs (App. G.1)."""

    def start(self, model, forget, retain) -> None:
        model.freeze_router_biases()
        for layer in model.layers:
            model.theta(layer).requires_grad_(False)

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        return before_Ed
