"""Quantisation as an attack: rounding may undo small weight changes that only hide knowledge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gripmoe.attacks.base import Found, Setting
from gripmoe.moe import MoEModel
from gripmoe.moe.modes import restored


def attack(setting: Setting) -> Found:
    """Scores with weights of 8 and of 4 bits."""
    found = {}
    for bits in (8, 4):
        with quantized(setting.after, bits):
            found[f"quantized_{bits}_bit"] = setting.scores_of(setting.after)
    return setting.found(found)


def rounded(weight: Tensor, bits: int, inputs: int = -1) -> Tensor:
    """`weight` rounded to 2^bits - 1 symmetric levels, with one scale for each output channel; `inputs` is the input
    dimension."""
    levels = 2 ** (bits - 1) - 1
    exact = weight.float()  # in bf16 scale and quotient would be rounded too
    scale = exact.abs().amax(dim=inputs, keepdim=True).clamp_min(1e-12) / levels
    return ((exact / scale).round() * scale).to(weight.dtype)


@contextmanager
def quantized(model: MoEModel, bits: int) -> Iterator[None]:
    """Within the block, all matrices of MoE blocks and attention are rounded, but not routers, norms, biases and
    embeddings."""
    routers = {id(model.theta(layer)) for layer in model.layers}
    matrices = {}  # and the input dimension of each
    for module in model.model.model.layers.modules():
        inputs = -2 if getattr(module, "is_transposed", False) else -1  # of the fused experts of GPT-OSS and Aria
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and not name.endswith("bias") and id(parameter) not in routers:
                matrices[parameter] = inputs
    with restored(matrices, device="cpu"):
        with torch.no_grad():
            for matrix, inputs in matrices.items():
                matrix.copy_(rounded(matrix, bits, inputs))
        yield
