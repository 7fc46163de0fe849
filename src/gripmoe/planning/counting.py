"""What counts the operations and the memory of a step on fake tensors, and answers for values that these lack."""

from __future__ import annotations

import gc
from collections.abc import Callable
from math import prod

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gripmoe.io import distributed

aten = torch.ops.aten


class Answers(TorchDispatchMode):
    """Replaces the values that fake tensors lack: booleans are False, numbers are 1, masks select everything, and
    `nonzero` finds nothing. So no constraint of Method A's Stage 2 is active."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if func in (aten.index.Tensor, aten.index_put_.default):
            tensor, indices = args[:2]
            for position, index in enumerate(indices):
                if index is not None and index.dtype == torch.bool:
                    if func is aten.index_put_.default:
                        return tensor
                    after = tensor.shape[position + index.dim() :]
                    return tensor.new_empty((*tensor.shape[:position], index.numel(), *after))
        return func(*args, **(kwargs or {}))


class Memory(MemTracker):
    """Peaks by phase, without the tracker's statistics by module, which assume one forward pass. Tensors inside
    compiled code (one kernel) and in DTensor's shape propagation do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.peaks, self.counts = "passes", {}, True
        self.gradients = self.states = self.received = self.operations = 0

    def _pre_fw_hook(self, *_) -> None:
        pass

    _post_fw_hook = _pre_bw_hook = _post_bw_hook = _pre_fw_hook

    def _update_peak_stats(self, peak_state) -> None:
        if self.counts:
            phase = "update" if self._in_opt else self.phase
            self.peaks[phase] = max(self.now(), self.peaks.get(phase, 0))

    def now(self) -> int:
        return sum(snapshot["Total"] for snapshot in self._curr_mem_snap.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # half of all calls
            return args[0].fake_device
        if func.namespace == "c10d":  # the larger of input and output, without this process's own share
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.received += max(bytes_of([tensor]) for tensor in tensors) * (1 - 1 / distributed.processes())
        self.operations += 1
        if self.operations % 100 == 0:
            gc.collect()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track_optimizer_states(self, reftype, optimizer) -> None:
        super()._track_optimizer_states(reftype, optimizer)
        self.phase = "afterwards"
        kept = [value for state in optimizer.state.values() for value in state.values()]
        self.states = bytes_of([value for value in kept if isinstance(value, torch.Tensor)])
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.gradients = bytes_of([parameter.grad for parameter in parameters if parameter.grad is not None])

    def uncounted(self, function: Callable, **_) -> Callable:
        def called(*args, **kwargs):
            before, self.counts = self.counts, False
            try:
                return function(*args, **kwargs)
            finally:
                self.counts = before

        return called


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Of their storages, each counted once."""
    storages = {storage._cdata: storage.nbytes() for tensor in tensors for storage in get_untyped_storages(tensor)}
    return sum(storages.values())


def _grouped_product(a_shape, b_shape, *_, out_shape=None, **__) -> int:
    """Operations of the products of T tokens with their experts' (d, m) matrices, or of the matrices' gradients."""
    return 2 * a_shape[-2] * a_shape[-1] * b_shape[-1]


def _attention(q_shape, k_shape, v_shape, *_, **__) -> int:
    """Operations of queries times keys and of scores times values, every position with every other."""
    return 2 * prod(q_shape[:-1]) * k_shape[-2] * (q_shape[-1] + v_shape[-1])


def _attention_backward(_, q_shape, k_shape, v_shape, *__, **___) -> int:
    """Operations of the recomputed scores, and of the gradients of scores, values, queries and keys."""
    return 2 * prod(q_shape[:-1]) * k_shape[-2] * (3 * q_shape[-1] + 2 * v_shape[-1])


def _decomposition(each: int) -> Callable[..., int]:
    """Operations of a decomposition of (m, n) matrices: `each` times m n min(m, n) (Golub and Van Loan)."""
    return lambda a_shape, *_, **__: SLOW * each * prod(a_shape) * min(a_shape[-2:])


def _qr(a_shape, mode="reduced", *_, **__) -> int:
    """Operations of a QR; to form Q takes as many as R does."""
    return _decomposition(2 if mode == "r" else 4)(a_shape)


# The weight of an operation of a decomposition: a GPU decomposes many small matrices at about a hundredth of the rate
# at which it multiplies (our assumption, not measured).
SLOW = 100
FORMULAS = {  # formulas that torch's counter lacks
    aten._grouped_mm: _grouped_product,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._linalg_svd: _decomposition(14),
    aten._linalg_eigh: _decomposition(9),
    aten.linalg_qr: _qr,
}
