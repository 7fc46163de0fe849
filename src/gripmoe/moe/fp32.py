"""Routers that compute in fp32, whatever the precision of the model around them."""

from __future__ import annotations

import torch
from torch import nn


def compute_in_fp32(router: nn.Module) -> bool:
    """Makes weight and logits of `router` fp32, under autocast too. The weights of chosen experts need no cast back,
    because transformers casts their products to the hidden dtype. Returns whether this call has converted the
    router."""
    dtype = router.weight.dtype
    router.float()
    if hasattr(router, "_in_fp32"):
        if dtype != torch.float32:  # the whole model was cast in between
            router._in_fp32 = dtype, router._in_fp32[1]
        return False
    handles = router.register_forward_pre_hook(_enter), router.register_forward_hook(_leave, always_call=True)
    router._in_fp32, router._no_autocast = (dtype, handles), None
    return True


def release(router: nn.Module, *, rounded: bool = False) -> None:
    """Undoes `compute_in_fp32` for a router that was in fp32 before. A router of lower precision stays in fp32. With
    `rounded` it returns to its dtype, which changes some of its selections."""
    dtype, handles = getattr(router, "_in_fp32", (None, ()))
    if dtype == torch.float32 or (dtype and rounded):
        for handle in handles:
            handle.remove()
        router.to(dtype)
        del router._in_fp32, router._no_autocast


def _enter(router, args):
    router._no_autocast = torch.autocast(args[0].device.type, enabled=False)
    router._no_autocast.__enter__()
    return (args[0].to(router.weight.dtype), *args[1:])  # fp32, unless the whole model was cast since


def _leave(router, args, output):
    router._no_autocast.__exit__(None, None, None)
    router._no_autocast = None
