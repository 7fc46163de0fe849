"""Warnings of what a loop changes without the constraint: routers that another optimizer steps, and the biases that
balance the load."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from gripmoe.moe import MoEModel


class LoopWatch:
    """Looks at routers and their load-balancing biases before and after each step of the constrained optimizer."""

    def __init__(self, model: MoEModel):
        self._model = model
        biases = {layer: rule.correction_bias_E for layer, rule in model.rules().items()}
        self._biases = [(layer, bias_E, bias_E.clone()) for layer, bias_E in biases.items() if bias_E is not None]
        self._versions = [bias_E._version for _, bias_E, _ in self._biases]
        self._has_stepped = False
        self._first_gradients = self._gradients()
        self._left: tuple[list[int], list[Tensor]] | None = None  # writes and norms after the last step

    def skip(self) -> None:
        """Before the first step, forgets the gradients that are there: only later ones show that the loop trains
        routers."""
        if not self._has_stepped:
            self._first_gradients = self._gradients()

    def loaded(self) -> None:
        """The weights of another run are loaded."""
        self._left = None

    def before_step(self) -> None:
        """Warns of biases that have changed since the loop began, and of routers that have since the last step."""
        self._has_stepped = True
        self._warn_of_biases()
        self._warn_of_other_steps()

    def after_step(self) -> None:
        self._left = self._writes(), self._norms()

    def at_close(self) -> None:
        """Warns of routers that have changed since the last step; and if routers got gradients, and there was no step
        at all."""
        self._warn_of_other_steps(looks=True)
        if not self._has_stepped and self._gradients() != self._first_gradients:
            warnings.warn(
                "the optimizer that `constrain` was given has never stepped, so no router was constrained: if another "
                "one trains the model, call `constrain` with that one",
                stacklevel=4,
            )

    def _gradients(self) -> list[tuple[int, int] | None]:
        """Of each router parameter which tensor its gradient is, and how often this was written to."""
        gradients = [parameter.grad for parameter in self._model.router_parameters()]
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def _writes(self) -> list[int]:
        """How often each router was written to in place."""
        return [self._model.theta(layer)._version for layer in self._model.layers]

    def _norms(self) -> list[Tensor]:
        thetas = [self._model.theta(layer).detach() for layer in self._model.layers]
        return list(torch._foreach_norm(thetas)) if thetas else []  # a dense model has none

    def _warn_of_other_steps(self, looks: bool = False) -> None:
        """`looks` also where no write is counted, since writes to `.data` are not. It waits for a GPU."""
        if self._left is None or (self._writes() == self._left[0] and not looks):
            return
        pairs = zip(self._model.layers, self._left[1], self._norms(), strict=True)
        layers = [  # norms on another device differ by rounding
            layer for layer, before, norm in pairs if before.device == norm.device and not torch.equal(before, norm)
        ]
        if layers:
            warnings.warn(
                f"the routers of layers {layers} have changed since the last step of the optimizer that `constrain` "
                "was given, and no constraint held. If another optimizer trains them: "
                "`gripmoe.constrain_again(handle, model, optimizer)`; if you have loaded weights: "
                "`handle.load_state_dict` with the state that was saved with them",
                stacklevel=5,
            )

    def _warn_of_biases(self) -> None:
        if [bias_E._version for _, bias_E, _ in self._biases] == self._versions:  # which asks no GPU
            return
        if layers := [layer for layer, bias_E, first_E in self._biases if not torch.equal(bias_E, first_E.to(bias_E))]:
            warnings.warn(
                f"the biases that balance the load have changed in the routers of layers {layers}, and selections "
                "change with them: leave them as they are while the constraint is on",
                stacklevel=5,
            )
            self._biases = []
        self._versions = [bias_E._version for _, bias_E, _ in self._biases]
