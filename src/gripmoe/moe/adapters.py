"""Wrappers around models and modules, recognised by their attributes: PEFT itself is never imported."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def below_adapters(module: nn.Module) -> nn.Module:
    """The module inside PEFT's wrappers: for `modules_to_save` the copy that trains, for LoRA and similar adapters the
    layer that they adapt. Without a wrapper, `module` itself."""
    return list(_layers(module))[-1]


def is_adapted(module: nn.Module) -> bool:
    """Whether an adapter such as LoRA changes the effective weights of `module`; `modules_to_save` does not."""
    return any(hasattr(layer, "base_layer") for layer in _layers(module))


def adapter_parameters(model: nn.Module) -> set[int]:
    """The ids of the parameters that adapters add to `model`."""
    tuners = [module for module in model.modules() if hasattr(module, "base_layer")]
    below = {id(parameter) for module in tuners for parameter in below_adapters(module).parameters()}
    return {id(parameter) for module in tuners for parameter in module.parameters()} - below


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile, accelerate, data parallelism or PEFT."""
    model = compiled_from(model)
    inner = getattr(model, "module", None)
    if isinstance(inner, nn.Module):
        return unwrapped(inner)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def compiled_from(model: nn.Module) -> nn.Module:
    """The model that torch.compile has wrapped, or `model` itself."""
    return getattr(model, "_orig_mod", model)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    while True:
        yield module
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            active = [] if module.disable_adapters else module.active_adapters
            copies = [module.modules_to_save[name] for name in active if name in module.modules_to_save]
            module = copies[0] if copies else module.original_module
        elif hasattr(module, "base_layer"):
            module = module.base_layer
        else:
            return


def holds_adapters(model: nn.Module) -> bool:
    """Whether PEFT's layers stand in the place of layers of `model`, also if `model` itself is not wrapped."""
    return any(hasattr(module, "base_layer") or hasattr(module, "original_module") for module in model.modules())
