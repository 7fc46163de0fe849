"""Muon (Jordan et al. 2024) for the matrices of experts and attention, AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

MUON_RATE = 10.0  # as a multiple of AdamW's
MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the published Newton-Schulz iteration
ITERATIONS = 5


def orthogonal(matrices: Tensor) -> Tensor:
    """(..., m, n) matrices with all singular values moved near 1, by Newton-Schulz iterations."""
    is_wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if is_wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if is_wide else x.mT


class MuonWithAdamW:
    """An optimizer of the parameters of `model` that require a gradient. `lr` is AdamW's rate. Expert tensors are
    stacks of matrices; a joint tensor of gate and up projections is two of them."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.matrices = {
            name: parameter
            for name, parameter in named.items()
            if parameter.ndim > 1 and not name.endswith(("embed_tokens.weight", "gate.weight"))
        }
        others = [parameter for name, parameter in named.items() if name not in self.matrices]
        groups = [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), foreach=True)
        self.momentum = {name: torch.zeros_like(parameter) for name, parameter in self.matrices.items()}
        self.lr = self.rate = lr

    def set_rate(self, multiple: float) -> None:
        self.rate = multiple * self.lr
        for group in self.adamw.param_groups:
            group["lr"] = self.rate

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        rate = MUON_RATE * self.rate
        for name, parameter in self.matrices.items():
            momentum = self.momentum[name].lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM)  # Nesterov
            update = orthogonal(update.unflatten(-2, (2 if name.endswith("gate_up_proj") else 1, -1)))
            scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            parameter.mul_(1 - rate * WEIGHT_DECAY).add_(update.flatten(-3, -2), alpha=-rate * scale)

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state_dict(), "momentum": self.momentum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        for name, momentum in self.momentum.items():
            momentum.copy_(state["momentum"][name])
