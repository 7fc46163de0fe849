"""Placement of a model by one process: on one device, or with its decoder layers in order on several devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from gripmoe.io import distributed


def visible_devices() -> list[torch.device]:
    """All GPUs that this process sees, or else the CPU. With several processes, the CPU: they shard the model later.
    Raises ConfigError if these are fewer GPUs than the workflow asked for (GRIPMOE_GPUS)."""
    distributed.require_gpus(int(os.environ.get("GRIPMOE_GPUS", 0)))
    if distributed.processes() > 1 or not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def place(model: nn.Module, devices: Sequence[torch.device | str]) -> None:
    """Moves the decoder layers of a causal language model, in order and evenly, to `devices`, and everything else to
    the first device, which takes inputs and returns outputs. Hidden states, masks and positions move from layer to
    layer."""
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
    """Moves the inputs of a module to the device of its weights, if it has weights. A cache does not move, because each
    layer makes its own entries."""
    from accelerate.utils import send_to_device  # transformers imports accelerate for a model anyway

    own = next(chain(module.parameters(), module.buffers()), None)
    return (args, kwargs) if own is None else send_to_device((args, kwargs), own.device, skip_keys="past_key_values")
