"""An attacker who relearns while a model unlearns, as in TAR (Tamirisa et al. 2024) and MUDMAN (Sondej et al. 2025).

Unlearning takes the gradient of its forget loss where relearning would bring the model, so that the loss holds there
too. The attacker starts from the model's weights every `restart` steps and goes on from its own in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class RelearningAdversary:
    """The attacker's copy of `parameters`, the ones that unlearning trains. A step of descent moves each weight by
    `rate` against the sign of its gradient, as AdamW's first step does; so the attacker keeps no state (ours)."""

    def __init__(self, parameters: Sequence[nn.Parameter], rate: float):
        self._parameters, self._rate = parameters, rate
        self._weights: list[Tensor] = []

    def restart(self) -> None:
        """The attacker takes the weights that the model has now."""
        self._weights = self._copies()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within the block the parameters have the attacker's weights. Gradients stay when it ends."""
        own = self._copies()
        self._write(self._weights)
        try:
            yield
        finally:
            self._weights = self._copies()
            self._write(own)

    def relearn(self, loss_of: Callable[[], Tensor]) -> float:
        """One step of descent on a loss, within `weights`; returns the loss. Gradients of earlier passes are kept."""
        kept = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        loss = loss_of()
        loss.backward()
        with torch.no_grad():
            for parameter, before in zip(self._parameters, kept, strict=True):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=self._rate)
                parameter.grad = before
        return loss.item()

    def _copies(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def _write(self, weights: Sequence[Tensor]) -> None:
        # In place: FSDP keeps the storage of a parameter, and would not see another tensor in its stead.
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)
