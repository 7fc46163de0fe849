"""Gradient routing (Cloud et al. 2024, arXiv 2410.04332): in base training, of the experts of each layer some alone
learn forget documents, so that the facts can be removed with these experts. Routers learn from all documents, and stay.

This is a best case of erasure: whoever has only the finished model cannot do this. E experts, T tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gripmoe.moe.recording import hooked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Weights of the loss terms (`leak`) that lead routers to the experts that learn. Documents to retain shall do without
# the experts that will be removed. Forget documents may use other experts beside their own.
FORGET_WEIGHT, RETAIN_WEIGHT = 0.3, 1.0


class GradientRouting:
    """Within `masked(model)`, backward passes leave a gradient in the last `count` experts of each layer while
    `of_forget` is true, and otherwise in all others. Routers always have theirs."""

    def __init__(self, count: int):
        self._count = count
        self.of_forget = False

    def masked(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        experts = [parameter for layer in model.model.layers for parameter in layer.mlp.experts.parameters()]
        return hooked(parameter.register_hook(self._masked) for parameter in experts)  # before passes are added up

    def own(self, logits_TE: Tensor) -> Tensor:
        """The logits of the experts that learn now."""
        kept, forget = logits_TE.tensor_split([-self._count], dim=-1)
        return forget if self.of_forget else kept

    def leak(self, logits_TE: Tensor) -> Tensor:
        """How little a router's softmax gives to the experts that learn now: minus the log of their share, weighted."""
        share_T = self.own(logits_TE.log_softmax(dim=-1)).logsumexp(dim=-1)
        return -(FORGET_WEIGHT if self.of_forget else RETAIN_WEIGHT) * share_T.mean()

    def _masked(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        kept, forget = gradient.tensor_split([-self._count])
        (kept if self.of_forget else forget).zero_()
        return gradient


@torch.no_grad()
def remove_experts(model: PreTrainedModel, count: int) -> None:
    """Makes the outputs of the last `count` experts of each layer zero. Routers may still select them."""
    for layer in model.model.layers:
        layer.mlp.experts.down_proj[-count:] = 0
