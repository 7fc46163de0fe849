"""Weight averaging: what is checked, and what a run ends with, is a moving average of the weights that train.

An average of the weights that an optimizer passes through lies where the loss is flatter (Izmailov et al. 2018), and
Fan et al. (2025) name averaging among the methods that make unlearning withstand relearning. On embedded models it
does not (docs/erasure_details.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gripmoe.moe.modes import restored


class WeightAverage:
    """The exponential moving average of `parameters`, in fp32: an `update` keeps the share `decay` of it. Starts from
    the weights that the parameters have."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float):
        self._parameters, self._decay = list(parameters), decay
        self._averages = [parameter.detach().to(torch.float32, copy=True) for parameter in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.lerp_(parameter.to(average.dtype), 1 - self._decay)

    @torch.no_grad()
    def write(self) -> None:
        """Gives the parameters the averaged weights."""
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            parameter.copy_(average)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within the block the parameters have the averaged weights."""
        with restored(self._parameters):
            self.write()
            yield

    def state(self) -> list[Tensor]:
        return self._averages

    @torch.no_grad()
    def load_state(self, averages: Sequence[Tensor]) -> None:
        for own, average in zip(self._averages, averages, strict=True):
            own.copy_(average)
