"""Where one process puts a model: on one device, or its decoder layers, in order, on several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from gripmoe.io import distributed


def visible_devices() -> list[torch.device]:
    """All GPUs that this process sees, or the CPU; the CPU for several processes, whose GPUs share one model later."""
    if distributed.processes() > 1 or not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def place(model: nn.Module, devices: Sequence[torch.device | str]) -> None:
    """Brings the decoder layers of a causal language model, in order and evenly, to `devices`, and all else to the
    first, where inputs go in and outputs come out. Hidden states, masks and positions follow from layer to layer."""
    decoder, layers = model.model, model.model.layers
    if len(set(devices)) == 1:
        model.to(devices[0])
        return
    for number, layer in enumerate(layers):
        layer.to(devices[number * len(devices) // len(layers)])
    decoder.layers = nn.ModuleList()
    try:
        model.to(devices[0])
    finally:
        decoder.layers = layers
    for module in (*layers, *(child for child in decoder.children() if child is not layers)):
        if _bring_along not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_bring_along, with_kwargs=True)


def devices_of(model: nn.Module) -> list[torch.device]:
    """The device of every decoder layer, as `place` takes them."""
    return [next(layer.parameters()).device for layer in model.model.layers]


def _bring_along(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The inputs of a module on the device of its weights, if it has any. A cache stays: each layer makes its own
    entries."""
    from accelerate.utils import send_to_device  # with a model, which transformers imports accelerate for

    own = next(chain(module.parameters(), module.buffers()), None)
    return (args, kwargs) if own is None else send_to_device((args, kwargs), own.device, skip_keys="past_key_values")
