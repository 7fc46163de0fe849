"""What baselines against relearning make of the forget gradient, before it and the retain gradient are added.

E experts, whose matrices are (m, n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from gripmoe.config.training import Training
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError

ForgetGradientEdit = Callable[[], dict[str, float]]  # changes gradients in place, and gives numbers for the history


class ComponentFilter:
    """RepSelect (Sondej et al. 2026): the gradient of each matrix of an expert loses its `count` leading principal
    components, which carry what other tokens need too. Fused gate and up projections are one matrix. Parameters that
    are no fused expert tensors keep theirs.

    Raises ConfigError where no expert tensor would have a gradient left.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], count: int):
        self._tensors = [parameter for parameter in parameters if parameter.ndim == 3]
        self._count = count
        ranks = [min(parameter.shape[1:]) for parameter in self._tensors]
        if not ranks:
            raise ConfigError("`dropped_components` is about matrices of experts: a dense model has none")
        if count >= min(ranks):
            raise ConfigError(f"`dropped_components` {count} leaves nothing of matrices of rank {min(ranks)}; lower it")

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        for parameter in self._tensors:
            if parameter.grad is not None:
                # Of a shard the experts of this process, each of which is whole.
                gradient_Emn = getattr(parameter.grad, "to_local", lambda grad=parameter.grad: grad)()
                try:
                    u_Emr, s_Er, v_Ern = torch.linalg.svd(gradient_Emn.float(), full_matrices=False)
                except torch.linalg.LinAlgError:  # not finite, in this process's shard alone perhaps
                    gradient_Emn.fill_(torch.nan)  # so that every process finds that the run has diverged
                    continue
                s_Er[:, : self._count] = 0
                gradient_Emn.copy_((u_Emr * s_Er[:, None]) @ v_Ern)
        return {}


class WeightDistance:
    """From Dormant to Deleted (Siddiqui et al. 2025): the loss has the term -`weight` times the distance from the
    original weights, relative to their norm, mean over tensors. The term has no gradient where nothing has moved."""

    def __init__(self, parameters: Sequence[nn.Parameter], weight: float):
        self._weight = weight
        self._pairs = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Adds the gradient of the term where the forget loss has one; gives the mean relative distance."""
        distances = []
        trained = [(parameter, original) for parameter, original in self._pairs if parameter.grad is not None]
        for parameter, original in trained:
            moved = parameter - original
            length, scale = (distributed.total_norm([tensor]).item() for tensor in (moved, original))
            distances.append(length / scale if scale else 0.0)  # of biases that are zero
            if distances[-1]:
                parameter.grad.sub_(moved, alpha=self._weight / (len(trained) * length * scale))
        return {"weight_distance": sum(distances) / max(1, len(distances))}


@contextmanager
def disruption_masked(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """MUDMAN's masks (Sondej et al. 2025): around the pass of the retain loss and penalty, before which `parameters`
    have the gradient of the forget loss. On exit they have the sum of both gradients. Elements of the forget gradient
    whose sign is not that of the retain gradient are dropped, also where the retain gradient is 0, as in experts that
    no retain token of the step has selected."""
    of_forget = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in of_forget:
        parameter.grad = None
    yield
    for parameter, gradient in of_forget:
        if parameter.grad is not None:
            parameter.grad.add_(gradient * (gradient.sign() == parameter.grad.sign()))


def forget_gradient_edits(parameters: Sequence[nn.Parameter], training: Training) -> list[ForgetGradientEdit]:
    """What a run does to its forget gradient, in order."""
    edits: list[ForgetGradientEdit] = []
    if training.dropped_components:
        edits.append(ComponentFilter(parameters, training.dropped_components))
    if training.distance_weight:
        edits.append(WeightDistance(parameters, training.distance_weight))
    return edits
