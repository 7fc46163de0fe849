"""The unlearning objectives (App. A.3): what makes a model forget, and what holds the rest.

Each is a forget loss plus `alpha` times a retain loss. Losses are means over scored tokens; padding never counts.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gripmoe.data.documents import IGNORED, Batch
from gripmoe.moe import MoEModel


class Objective(Protocol):
    """`reference` is the model before unlearning; it is never changed."""

    alpha: float

    def forget_loss(self, model: MoEModel, reference: MoEModel, batch: Batch) -> Tensor: ...

    def retain_loss(self, model: MoEModel, reference: MoEModel, batch: Batch) -> Tensor: ...


def cross_entropy(model: MoEModel, batch: Batch) -> Tensor:
    """Mean negative log-likelihood of the scored tokens."""
    logits = model.model(**batch.inputs).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)


class GradientDifference:
    """GD: ascend on forget tokens, descend on retain tokens."""

    def __init__(self, alpha: float = 1.0):
        self.alpha = alpha

    def forget_loss(self, model, reference, batch) -> Tensor:
        return -cross_entropy(model, batch)

    def retain_loss(self, model, reference, batch) -> Tensor:
        return cross_entropy(model, batch)


class RepresentationMisdirection:
    """RMU: drive one layer's hidden states of forget tokens to a fixed random vector, hold those of retain tokens.

    `steering` is c, the length of that vector, whose direction is drawn uniformly from [0, 1)^d as in the official
    code; squares are averaged over d as there. Layers above `layer` get no gradient.
    """

    def __init__(self, hidden_size: int, *, layer: int, steering: float, alpha: float, seed: int):
        direction_d = torch.rand(hidden_size, generator=torch.Generator().manual_seed(seed))
        self.target_d = steering * direction_d / direction_d.norm()
        self.layer = layer
        self.alpha = alpha

    def forget_loss(self, model, reference, batch) -> Tensor:
        hidden = self._hidden(model, batch)
        return _masked_mean((hidden - self.target_d.to(hidden)).square().mean(dim=-1), batch.attention_mask)

    def retain_loss(self, model, reference, batch) -> Tensor:
        with torch.no_grad():
            wanted = self._hidden(reference, batch)
        return _masked_mean((self._hidden(model, batch) - wanted).square().mean(dim=-1), batch.attention_mask)

    def _hidden(self, model: MoEModel, batch: Batch) -> Tensor:
        with model.record_hidden(self.layer) as outputs:
            model.model.model(**batch.inputs)
        return outputs[0]


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def make_objective(name: str, settings: dict, model: MoEModel, seed: int) -> Objective:
    """The objective of a run; `settings` are its own hyperparameters. Raises ValueError for an unknown name."""
    if name == "gd":
        return GradientDifference(**settings)
    if name == "rmu":
        return RepresentationMisdirection(model.hidden_size, seed=seed, **settings)
    raise ValueError(f"unknown objective {name!r}; gd or rmu")
