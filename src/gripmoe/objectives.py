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

    `steering` is c, the length of that vector; its direction is drawn uniformly from [0, 1)^d as in the official code,
    and squares are averaged over d as there. Layers above `layer` get no gradient.
    """

    def __init__(self, hidden_size: int, *, layer: int, steering: float, alpha: float, seed: int):
        direction_d = torch.rand(hidden_size, generator=torch.Generator().manual_seed(seed))
        self.target_d = steering * direction_d / direction_d.norm()
        self.layer = layer
        self.alpha = alpha

    @classmethod
    def relative(
        cls, model: MoEModel, batch: Batch, *, layer: int, kappa: float, alpha: float, seed: int
    ) -> RepresentationMisdirection:
        """With c as `kappa` times the mean length of the layer's hidden states on `batch`: a fixed c means something
        else in every model."""
        with torch.no_grad():
            lengths = hidden_states(model, layer, batch).norm(dim=-1)
        mean_length = _masked_mean(lengths, batch.attention_mask).item()
        return cls(model.hidden_size, layer=layer, steering=kappa * mean_length, alpha=alpha, seed=seed)

    def forget_loss(self, model, reference, batch) -> Tensor:
        hidden = hidden_states(model, self.layer, batch)
        return _masked_mean((hidden - self.target_d.to(hidden)).square().mean(dim=-1), batch.attention_mask)

    def retain_loss(self, model, reference, batch) -> Tensor:
        with torch.no_grad():
            wanted = hidden_states(reference, self.layer, batch)
        return _masked_mean(
            (hidden_states(model, self.layer, batch) - wanted).square().mean(dim=-1), batch.attention_mask
        )


def hidden_states(model: MoEModel, layer: int, batch: Batch) -> Tensor:
    """Output of decoder layer `layer`, (rows, positions, d)."""
    with model.record_hidden(layer) as outputs:
        model.model.model(**batch.inputs)
    return outputs[0]


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def make_objective(name: str, settings: dict, model: MoEModel, batch: Batch, seed: int) -> Objective:
    """The objective of a run; `settings` are its own hyperparameters, `batch` retain documents that set RMU's scale.
    Raises ValueError for an unknown name."""
    if name == "gd":
        return GradientDifference(**settings)
    if name == "rmu" and "kappa" in settings:
        return RepresentationMisdirection.relative(model, batch, seed=seed, **settings)
    if name == "rmu":
        return RepresentationMisdirection(model.hidden_size, seed=seed, **settings)
    raise ValueError(f"unknown objective {name!r}; gd or rmu")
