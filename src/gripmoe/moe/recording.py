"""Hooks that record the routing of forward passes, and the rule which tokens count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gripmoe.geometry.routing import LayerRouting, RoutingTrace


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
        self._seen: dict[int, list[LayerRouting]] = {}

    def _add(self, layer: int, routing: LayerRouting) -> None:
        self._seen.setdefault(layer, []).append(routing)

    def take(self, keep: Tensor | None = None) -> RoutingTrace:
        """Returns and clears the trace of the forward passes since the last call. `keep` (bool, one entry per token)
        selects tokens, for example those that are not padding."""
        trace = {layer: LayerRouting.joined(seen) for layer, seen in self._seen.items()}
        self._seen.clear()
        if keep is None:
            return trace
        keep = keep.reshape(-1)
        return {layer: LayerRouting(r.x_Nd[keep], r.scores_NE[keep], r.top_k_Nk[keep]) for layer, r in trace.items()}


def routed_tokens(attention_mask: Tensor) -> Tensor:
    """Which tokens count in a routing measure, (rows * positions,): neither padding nor the first token of a row."""
    return (attention_mask.bool() & (attention_mask.cumsum(dim=-1) > 1)).reshape(-1)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Within the block, the hooks of `handles` are registered. An iterator may register them one by one."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield
