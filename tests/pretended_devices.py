"""Several devices where there is only a CPU: each tensor is marked with the device that it pretends to lie on, and an
operation that mixes devices raises, as on GPUs.

Devices are called cpu:1, cpu:2, ...; what is not marked lies in host memory. Every call of torch from Python is seen,
and so is what a call of torch makes of itself in C++, since its own arguments are what is compared. Not seen is the
backward pass. Marks are lost, and tensors taken for the host's, where C++ makes tensors by itself.
"""

from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

HOST = torch.device("cpu")
FIRST, SECOND = torch.device("cpu:1"), torch.device("cpu:2")
# What may see two devices.
ACROSS = {"to", "copy_", "cpu", "__set__", "__get__", "backward", "_has_compatible_shallow_copy_type"}
JOINS = {"stack", "cat"}  # unlike arithmetic take no number from the host
SORTED = ("_foreach", "_fused")  # operations of optimizers, which sort tensors by their devices
INDEXED = {"__getitem__", "__setitem__"}  # also by indices from the host


class MixedDevices(RuntimeError):
    pass


def device_of(tensor: Tensor) -> torch.device:
    return vars(tensor).get("_pretended", HOST)


class PretendedDevices(TorchFunctionMode):
    def __enter__(self):
        make = nn.Parameter.__new__

        def marked(cls, data=None, requires_grad=True):  # the one constructor that a mode does not see
            parameter = make(cls, data, requires_grad)
            if data is not None:
                parameter._pretended = device_of(data)
            return parameter

        self._parameters = patch.object(nn.Parameter, "__new__", marked)
        self._parameters.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._parameters.stop()
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func == Tensor.device.__get__:
            return device_of(args[0])
        if func == Tensor.is_cpu.__get__:
            return device_of(args[0]) == HOST
        if name == "numpy" and device_of(args[0]) != HOST:
            raise MixedDevices("numpy: of a tensor that is not in host memory")
        if name not in ACROSS and not name.startswith(SORTED):
            self._check(name, args, tensors)
        where = self._result_device(name, args, kwargs, tensors)
        if name == "to":  # or a tensor that is there already would be copied
            args = [HOST if isinstance(value, str | torch.device) else value for value in args]
            kwargs = {key: HOST if key == "device" else value for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if func == Tensor.data.__set__:
            args[0]._pretended = device_of(args[1])
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and device_of(leaf) != where:
                if any(leaf is tensor for tensor in tensors):
                    if name not in ("to", "cpu"):
                        continue
                    result = leaf = leaf.clone()
                leaf._pretended = where
        return result

    def _check(self, name, args, tensors):
        if name in INDEXED:
            indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
            tensors = [t for t in tensors if not any(t is i for i in indices) or device_of(t) != HOST]
        numbers = () if name in JOINS else [t for t in tensors if t.ndim == 0 and device_of(t) == HOST]
        devices = {device_of(t) for t in tensors if not any(t is number for number in numbers)}
        if len(devices) > 1:
            shapes = [f"{tuple(t.shape)} on {device_of(t)}" for t in tensors]
            raise MixedDevices(f"{name}: tensors of {', '.join(shapes)}")

    def _result_device(self, name, args, kwargs, tensors):
        if name == "cpu":
            return HOST
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
        if name == "to":
            for target in args[1:]:
                if isinstance(target, Tensor):
                    return device_of(target)
                if isinstance(target, str | torch.device):
                    return torch.device(target)
        found = [device_of(tensor) for tensor in tensors] or [HOST]
        return found[0] if name in ACROSS else next((device for device in found if device != HOST), HOST)
