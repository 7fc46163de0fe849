"""Quantisation as an attack: rounding may undo small weight changes that only hide knowledge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gripmoe.attacks.scores import Recall, Scores, kept
from gripmoe.moe import MoEModel


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Round to nearest on 2^bits - 1 symmetric levels, one scale per output channel (the last dimension is summed over
    in use)."""
    levels = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / levels
    return (weight / scale).round() * scale


@contextmanager
def quantized(model: MoEModel, bits: int) -> Iterator[None]:
    """Within the block every matrix of the MoE blocks and of attention is rounded to `bits`; routers, norms and
    embeddings are not."""
    routers = {id(model.theta(layer)) for layer in model.layers}
    matrices = [
        parameter
        for layer in model.model.model.layers
        for parameter in layer.parameters()
        if parameter.ndim > 1 and id(parameter) not in routers
    ]
    with kept(matrices):
        with torch.no_grad():
            for matrix in matrices:
                matrix.copy_(rounded(matrix, bits))
        yield


def quantization(model: MoEModel, recall: Recall, bits: Sequence[int] = (8, 4)) -> dict[str, Scores]:
    """What `recall` says that the model still knows with rounded weights."""
    found = {}
    for count in bits:
        with quantized(model, count):
            found[f"quantized_{count}_bit"] = recall(model)
    return found
