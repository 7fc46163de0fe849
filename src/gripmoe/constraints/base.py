"""The interface of a constraint on routers, and two simple constraints: none, and frozen routers.

N tokens that count, T all tokens of a pass, d hidden size, E experts. A token counts unless it is padding or the first
token of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gripmoe.data.documents import Batch
from gripmoe.geometry.routing import LayerRouting, RoutingTrace
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.modes import freeze


@dataclass(frozen=True)
class Tokens:
    """The inputs of a marked forward pass, (rows, positions), and a mask `keep` of the tokens that count, (T,)."""

    input_ids: Tensor
    attention_mask: Tensor
    keep: Tensor


@dataclass(frozen=True)
class MarkedPass:
    """Routing and final normed hidden states of the tokens that count in a marked forward pass, with their graph."""

    routing: RoutingTrace
    hidden_Nd: Tensor
    tokens: Tokens


class RouterConstraint:
    """Replaces the routers after an optimizer step by feasible ones, or adds a penalty to the loss. The default does
    neither."""

    watches: frozenset[str] = frozenset()  # kinds of passes, "retain" or "forget", for which `penalty` is called
    collects = False  # whether `constrain` receives the routing of these passes
    needs_graph = False  # whether gradients of `penalty` flow through router inputs, into experts of earlier layers
    # Whether `constrain` is called before the step, with the result of a plain gradient step, and then replaces the
    # gradients. An optimizer such as AdamW rescales them, so the step itself may end elsewhere.
    of_gradient = False
    of_update = True  # whether `constrain` is called after the step, with the optimizer's result
    every = 1  # steps from one `constrain` to the next, if it is called after the step; 1 if it `collects`
    original: MoEModel | None = None  # a copy; without one, `start` stores what the model computes for retain data

    def start(self, model: MoEModel, retain: Sequence[Batch]) -> None:
        """Is called once, with the model before unlearning and the retain documents that training will use. Gradients
        are on: run passes within `torch.no_grad()`."""

    def constrain(self, layer: int, before_Ed: Tensor, after_Ed: Tensor, seen: LayerRouting | None) -> Tensor:
        """The router, (E, d), that replaces `after_Ed`. `after_Ed`: after the optimizer's step (`of_update`) or after a
        plain gradient step (`of_gradient`, fp64). `before_Ed`: what the last call returned, or the router before the
        first step since then; leave it as it is. `seen`: if it `collects`, the routing of the passes since the last
        step, of all processes; under routing replay its `top_k_Nk` are the original model's sets."""
        return after_Ed

    def after_step(self) -> None:
        """Is called once after each step of the optimizer, before `constrain`."""

    def penalty(self, marked: MarkedPass) -> Tensor | float:
        """What to add to the loss for a marked pass: a scalar with its graph, or 0.0. Is called for the kinds of passes
        in `watches` alone, with the rows of this process."""
        return 0.0

    def skip(self) -> None:
        """Forgets the passes since the last step. Is called after each step, and where no step comes."""

    def observed(self) -> dict[str, float]:
        """Numbers about the latest steps, for the history of a run, by names that are not of losses or scores."""
        return {}

    def state(self) -> dict:
        """What a resumed run needs beyond the model and the optimizer: numbers, strings and tensors, by names other
        than "origin" and "waiting"."""
        return {}

    def load_state(self, state: dict) -> None:
        """Takes back a `state`, whose tensors may be on another device. Is called after `start` when a run resumes,
        unless the state is empty."""

    def require_usable(self) -> None:
        """Raises ConfigError if its attributes contradict its methods."""
        name = type(self).__name__
        if type(self).penalty is not RouterConstraint.penalty and not self.watches:
            raise ConfigError(f"{name}.penalty is never called: name the kinds of passes in `watches`")
        if self.collects and not self.watches:
            raise ConfigError(f"{name} collects no passes: name their kinds in `watches`")
        if self.collects and self.every > 1:
            raise ConfigError(f"{name} collects the passes of one step, and `every` is {self.every}: set it to 1")

    def require_shape(self, method: str, made: Tensor | float, shape: tuple[int, ...]) -> None:
        """Raises ConfigError if `method` has `made` something of another shape; a number has the shape ()."""
        found = tuple(made.shape) if isinstance(made, Tensor) else () if isinstance(made, int | float) else type(made)
        if found != tuple(shape):
            raise ConfigError(
                f"{type(self).__name__}.{method} returned {found}: return a tensor of shape {tuple(shape)}"
            )


class Unconstrained(RouterConstraint):
    """No constraint."""


class FrozenRouter(RouterConstraint):
    """Theta never changes. Routing still changes where experts below the router move its inputs (App. G.1)."""

    def start(self, model, retain) -> None:
        freeze(model.router_parameters())

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        return before_Ed
