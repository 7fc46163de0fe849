"""Routers that compute in fp32, whatever the precision of the model around them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def compute_in_fp32(router: nn.Module) -> bool:
    """Makes weight and logits of `router` fp32, under autocast too. The weights of chosen experts need no cast back,
    because transformers casts their products to the hidden dtype. Returns whether this call has converted the
    router.

    Where a program has turned on TF32, logits are rounded to it all the same: that is a setting of the whole process,
    which the backward pass reads too when the hooks have gone, and torch refuses to mix its two interfaces."""
    dtypes = {name: tensor.dtype for name, tensor in _tensors(router)}
    lower = router.weight.dtype != torch.float32
    router.float()
    if hasattr(router, "_in_fp32"):
        if lower:  # the whole model was cast in between
            router._in_fp32 = dtypes, router._in_fp32[1]
        return False
    handles = router.register_forward_pre_hook(_enter), router.register_forward_hook(_leave, always_call=True)
    router._in_fp32, router._no_autocast = (dtypes, handles), None
    return True


def release(router: nn.Module, *, to_own_dtype: bool = False) -> None:
    """Undoes `compute_in_fp32` for a router that was in fp32 before. A router of lower precision stays in fp32. With
    `to_own_dtype` each of its tensors returns to its dtype, which changes some selections. (transformers keeps the
    biases of some families in fp32 beside a weight in bf16.)"""
    dtypes, handles = getattr(router, "_in_fp32", ({}, ()))
    if dtypes and (to_own_dtype or dtypes["weight"] == torch.float32):
        for handle in handles:
            handle.remove()
        for name, tensor in _tensors(router):
            grad, dtype = tensor.grad, dtypes.get(name, tensor.dtype)
            tensor.grad = None  # it has the dtype of its tensor
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None if grad is None else grad.to(dtype)
        del router._in_fp32, router._no_autocast


def _tensors(router: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that `nn.Module.float` casts."""
    named = (*router.named_parameters(), *router.named_buffers())
    return ((name, tensor) for name, tensor in named if tensor.is_floating_point())


def _enter(router, args):
    if torch.is_autocast_enabled(args[0].device.type):  # if not, torch.compile makes one graph of the model
        router._no_autocast = torch.autocast(args[0].device.type, enabled=False)
        router._no_autocast.__enter__()
    # fp32, unless the whole model was cast since. A parametrized weight would be computed to read its dtype.
    return (args[0].to(next(router.parameters()).dtype), *args[1:])


def _leave(router, args, output):
    if router._no_autocast is not None:
        router._no_autocast.__exit__(None, None, None)
        router._no_autocast = None
