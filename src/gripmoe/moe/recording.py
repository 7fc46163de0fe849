"""What has been recorded of forward passes, which tokens count, and helpers for hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gripmoe.geometry.routing import LayerRouting, RoutingTrace
from gripmoe.moe.unpadded import Padding


def in_recomputation() -> bool:
    """Whether gradient checkpointing is recomputing a forward pass inside the backward pass. Hooks must not count
    it."""
    return torch._C._current_graph_task_id() != -1


def place_in_graph() -> int:
    """The sequence number that autograd gives the next operation. In a recomputation: the number of the operation whose
    gradient needs it, which belongs to the recomputed forward pass."""
    operation = torch._C._current_autograd_node()
    return torch.autograd._get_sequence_nr() if operation is None else operation._sequence_nr()


class RoutingRecorder:
    """Collects the routing of every forward pass within `MoEModel.record_routing`."""

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[LayerRouting, Padding | None]]] = {}  # and the padding that the pass left out

    def _add(self, layer: int, routing: LayerRouting, padding: Padding | None) -> None:
        self._seen.setdefault(layer, []).append((routing, padding))

    def passes(self) -> dict[int, int]:
        """How often each layer has routed since the last `take`."""
        return {layer: len(passes) for layer, passes in self._seen.items()}

    def take(self, keep: Tensor | None = None) -> RoutingTrace:
        """Returns and clears the trace of the forward passes since the last call. `keep` (bool, one entry per token)
        selects tokens, for example those that are not padding."""
        seen, self._seen = self._seen, {}
        if keep is None:
            return {
                layer: LayerRouting.joined([each.map(padding.added) if padding else each for each, padding in passes])
                for layer, passes in seen.items()
            }
        rows = _rows(keep.reshape(-1), next(iter(seen.values()))) if seen else []  # the same in every layer
        return {
            layer: LayerRouting.joined([each.map(chosen) for (each, _), chosen in zip(passes, rows, strict=True)])
            for layer, passes in seen.items()
        }


def _rows(keep_T: Tensor, passes: Sequence[tuple[LayerRouting, Padding | None]]) -> list[Callable[[Tensor], Tensor]]:
    """For each pass, a function that selects its kept tokens; it takes the tokens that the pass has computed."""
    sizes = [padding.shape.numel() if padding else len(routing) for routing, padding in passes]
    chosen = []
    for keep, (_, padding) in zip(keep_T.split(sizes), passes, strict=True):
        # The loop's mask may be on another device than the pass, as under accelerate.
        index = places_of(keep[padding.real_U.to(keep.device)] if padding else keep)
        chosen.append(lambda values, index=index: values.index_select(0, index.to(values.device)))
    return chosen


def places_of(keep_T: Tensor) -> Tensor:
    """The numbers of the kept tokens: to select with them is faster than to select with a mask again and again."""
    return torch.arange(len(keep_T), device=keep_T.device)[keep_T]


def counted_tokens(attention_mask: Tensor) -> Tensor:
    """Which tokens count in a routing measure, (rows * positions,): neither padding nor the first token of a row."""
    return (attention_mask.bool() & (attention_mask.cumsum(dim=-1) > 1)).reshape(-1)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Within the block, the hooks of `handles` are registered. An iterator may register them one by one."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield
