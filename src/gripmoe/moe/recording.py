"""What a forward pass shows of routers: the hooks that read it, and which of its tokens count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gripmoe.geometry.routing import LayerRouting, RoutingTrace


def in_recomputation() -> bool:
    """True while gradient checkpointing runs a forward again inside backward: hooks must not count it."""
    return torch._C._current_graph_task_id() != -1


def place_in_graph() -> int:
    """The number that autograd gives the next operation of a forward pass. In a recomputation, the number of the
    operation whose gradient needs it: that operation lies in the forward pass that is computed again."""
    operation = torch._C._current_autograd_node()
    return torch.autograd._get_sequence_nr() if operation is None else operation._sequence_nr()


class RoutingRecorder:
    """Collects the routing of every forward pass within `MoEModel.record_routing`."""

    def __init__(self) -> None:
        self._seen: dict[int, list[LayerRouting]] = {}

    def _add(self, layer: int, routing: LayerRouting) -> None:
        self._seen.setdefault(layer, []).append(routing)

    def take(self, keep: Tensor | None = None) -> RoutingTrace:
        """The trace since the last call, in order of the forward passes, and forgets it.

        `keep` (bool, as many entries as there were tokens) selects tokens, for example those that are not padding.
        """
        trace = {}
        for layer, seen in self._seen.items():
            parts = [(r.x_Nd, r.scores_NE, r.top_k_Nk) for r in seen]
            x, scores, top_k = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            if keep is not None:
                x, scores, top_k = (tensor[keep.reshape(-1)] for tensor in (x, scores, top_k))
            trace[layer] = LayerRouting(x, scores, top_k)
        self._seen.clear()
        return trace


def routed_tokens(attention_mask: Tensor, skip_positions: int = 1) -> Tensor:
    """Which tokens count in a routing measure: no padding on either side, not the first `skip_positions` of a row."""
    return (attention_mask.bool() & (attention_mask.cumsum(dim=-1) > skip_positions)).reshape(-1)


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    handles = []
    try:
        for module, hook in hooks:
            handles.append(module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()
