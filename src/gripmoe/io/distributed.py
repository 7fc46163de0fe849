"""Several processes that train one model together. In a single process no function here needs others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gripmoe.io.errors import ConfigError


@contextmanager
def launched() -> Iterator[None]:
    """Within the block, the processes that torchrun has started form a group. If there are GPUs, each process has
    one."""
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        require_gpus(int(os.environ["LOCAL_WORLD_SIZE"]))
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Others wait while the first process writes a model.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(hours=2))
    try:
        yield
    finally:
        dist.destroy_process_group()


def require_gpus(asked: int) -> None:
    """Raises ConfigError if this process sees fewer GPUs."""
    if (seen := torch.cuda.device_count()) < asked:
        raise ConfigError(
            f"GRIPMOE_GPUS: the job asked for {asked} GPUs, and torch {torch.__version__} sees {seen} here. Compare "
            "with `nvidia-smi` on this node (the driver, torch's CUDA build, CUDA_VISIBLE_DEVICES), or give the model "
            "fewer under `gpus` of its world: with 0 its jobs ask for none"
        )


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this process is the one that writes files."""
    return rank() == 0


def wait_for_all() -> None:
    if processes() > 1:
        dist.barrier()


@torch.no_grad()
def gathered(local_N: Tensor) -> Tensor:
    """The rows of every process, in the order of ranks; processes may have different numbers of rows."""
    if processes() == 1:
        return local_N
    counts = [torch.zeros(1, dtype=torch.int64, device=local_N.device) for _ in range(processes())]
    dist.all_gather(counts, torch.tensor([len(local_N)], device=local_N.device))
    longest = max(int(count) for count in counts)
    padded = local_N.new_zeros(longest, *local_N.shape[1:])
    padded[: len(local_N)] = local_N
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


@torch.no_grad()
def averaged_(tensor: Tensor) -> Tensor:
    """The mean of a tensor over all processes, in place."""
    if processes() > 1:
        dist.all_reduce(tensor)
        tensor /= processes()
    return tensor


def average(value: float) -> float:
    """The mean of a number over all processes."""
    return averaged_(_number(value)).item() if processes() > 1 else value


def share(count: int) -> float:
    """The weight of this process's mean over `count` items. With it, the average of the processes' means is the mean
    over all items."""
    mean = average(float(count))
    return count / mean if mean else 1.0


def agreed(values: dict[str, float]) -> dict[str, float]:
    """The numbers of the first process, so that all processes decide alike."""
    if processes() == 1:
        return values
    return dict(zip(values, from_first_(_number(list(values.values()))).tolist(), strict=True))


def _number(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def from_first_(tensor: Tensor) -> Tensor:
    """Gives every process the tensor of the first one, in place."""
    if processes() > 1:
        dist.broadcast(tensor, src=0)
    return tensor


def text_of_first(text: str) -> str:
    """The text of the first process; the others wait for it."""
    shared = [text]
    if processes() > 1:
        dist.broadcast_object_list(shared, src=0)
    return shared[0]


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of all tensors together, over all shards of sharded tensors."""
    from torch.distributed.tensor import DTensor  # which imports sympy: a second

    sharded = [tensor.to_local() for tensor in tensors if isinstance(tensor, DTensor)]
    norm = nn.utils.get_total_norm([tensor for tensor in tensors if not isinstance(tensor, DTensor)])
    if not sharded:
        return norm
    squared = nn.utils.get_total_norm(sharded).double().square()
    dist.all_reduce(squared)
    return (squared + norm.double().square().to(squared.device)).sqrt()


def by_sharding(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Splits parameters into whole and sharded ones: torch's operations on lists of tensors do not take both."""
    from torch.distributed.tensor import DTensor  # which imports sympy: a second

    whole, sharded = [], []
    for parameter in parameters:
        (sharded if isinstance(parameter, DTensor) else whole).append(parameter)
    return [part for part in (whole, sharded) if part]


def clip_gradients(parameters: list[nn.Parameter], clip_norm: float, norm: float) -> None:
    """Scales gradients so that their `norm`, over all processes' shards, is at most `clip_norm`."""
    if norm <= clip_norm:
        return
    for alike in by_sharding(parameters):
        nn.utils.clip_grads_with_norm_(alike, clip_norm, torch.tensor(norm))
