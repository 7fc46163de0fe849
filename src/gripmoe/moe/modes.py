"""Modes of a model within a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block, `model` is in eval mode; afterwards each module has its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """Stops the training of `parameters`. Their gradients go too, or momentum and weight decay would still move
    them."""
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None


def train_only(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Freezes all other parameters of `model`, and returns those that train."""
    model.requires_grad_(False)
    return [parameter.requires_grad_(True) for parameter in parameters]


@contextmanager
def restored(tensors: Iterable[Tensor], device: str | None = None) -> Iterator[None]:
    """When the block ends, the tensors have the values that they had before it. Their copies are on `device`, or beside
    them. Values are written in place: FSDP keeps the storage of a parameter."""
    own = [(tensor, tensor.detach().to(device or tensor.device, copy=True)) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in own:
                tensor.copy_(before)


@contextmanager
def checkpointing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Within the block, a backward pass of `model` computes activations again, if that is `wanted` or was so before; a
    model that does already keeps its own way. Raises ValueError for a family that cannot."""
    if not wanted or model.is_activation_checkpointing:
        yield
        return
    # Enabling adds hooks that make embeddings require gradients, and forgets those that `model` has.
    inputs_required = bool(getattr(model, "_require_grads_hooks", None))
    model.disable_input_require_grads()
    try:
        model.activation_checkpointing_enable({"use_reentrant": False})
        yield
    finally:
        model.activation_checkpointing_disable()
        model.disable_input_require_grads()
        if inputs_required:
            model.enable_input_require_grads()
