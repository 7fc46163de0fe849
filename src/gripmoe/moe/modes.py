"""Modes of a model within a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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


@contextmanager
def checkpointing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Within the block, a backward pass of `model` computes activations again, if that is `wanted`."""
    if wanted:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        if wanted:
            model.gradient_checkpointing_disable()
