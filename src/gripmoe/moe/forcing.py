"""Expert forcing: a model computes with given experts in place of those that its routers select (App. E, Alg. 2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import torch
from torch import Tensor

from gripmoe.moe.recording import in_recomputation, place_in_graph
from gripmoe.moe.unpadded import Padding

# By layer: top_k_Tk of one forward pass, or a pair (top_k_Tk, weights_Tk).
Routes = dict[int, Tensor | tuple[Tensor, Tensor]]


class Forcing:
    """The routes of every pass within `MoEModel.force_routing`, and the hooks that force them. `find` returns the
    routes of a pass; without it, all passes have the same `routes`."""

    def __init__(self, routes: Routes | None, find: Callable[..., Routes | None] | None):
        self.current, self.find = routes, find
        # The passes that may be recomputed: where each begins in the graph, and its routes.
        self.passes: list[tuple[int, Routes | None]] = [] if find else [(place_in_graph(), routes)]
        self._finding = False  # `find` may itself run the model

    def begin_pass(self, args: tuple, kwargs: dict) -> None:
        """Runs before each pass of the decoder."""
        if self._finding or in_recomputation():
            return
        input_ids = args[0] if args else kwargs.get("input_ids")
        if input_ids is None:
            raise ValueError("forced routing finds the routes of a pass by its tokens: give `input_ids`")
        self._finding, begins = True, place_in_graph()
        try:
            self.current = self.find(input_ids, kwargs.get("attention_mask"))
        finally:
            self._finding = False
        if torch.is_grad_enabled():
            self.passes.append((begins, self.current))

    def of_layer(self, layer: int, own_Tk: Tensor, padding: Padding | None) -> tuple[Tensor, Tensor | None] | None:
        """The experts of a layer in this pass, and their weights if these are given. None if nothing is forced.
        `own_Tk` are the experts that the router selects."""
        if self._finding or (routes := self._of_pass()) is None:
            return None
        route = routes[layer]
        top_k_Tk, weights_Tk = route if isinstance(route, tuple) else (route, None)
        tokens = padding.shape.numel() if padding else len(own_Tk)
        if tokens != len(top_k_Tk):
            raise ValueError(f"layer {layer}: routes for {len(top_k_Tk)} tokens, the pass has {tokens}")
        if padding:
            top_k_Tk = padding.removed(top_k_Tk)
            weights_Tk = None if weights_Tk is None else padding.removed(weights_Tk)
        return top_k_Tk.to(own_Tk.device), weights_Tk

    def _of_pass(self) -> Routes | None:
        if not in_recomputation():
            return self.current
        begun = bisect_right(self.passes, place_in_graph(), key=lambda begun: begun[0])
        return self.passes[begun - 1][1] if begun else None
