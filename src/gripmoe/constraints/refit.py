"""Ours: routers that are refitted within the retain pass, each just before it is used (`anchored_tracked`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gripmoe.constraints.base import RouterConstraint, Tokens
from gripmoe.io import distributed
from gripmoe.moe import MoEModel
from gripmoe.moe.recording import hooked, in_recomputation, place_in_graph


class RouterRefit:
    """Runs the retain passes that `follow` announces with the routers that `constraint.refit` returns, layer by layer.

    The router weights themselves change only at the step, because backward passes need the earlier weights. Fitted
    routers are kept until `clear`, because gradient checkpointing may recompute any pass since the last step.
    """

    def __init__(self, model: MoEModel, constraint: RouterConstraint):
        self._model, self._constraint = model, constraint
        self._followed: Tokens | None = None
        # For each forward pass since the last step: its place in the graph, and its fitted routers by layer.
        self._passes: list[tuple[int, dict[int, Tensor]]] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        begin = self._model.model.model.register_forward_pre_hook(self._begin)
        with hooked([begin]), self._model.before_routers(self._theta):
            yield

    def follow(self, tokens: Tokens | None) -> None:
        """Announces a retain pass and its tokens that count; None once the pass has ended."""
        self._followed = tokens

    def clear(self) -> None:
        self._passes.clear()

    def refit(self, inputs: Mapping[str, Tensor], tokens: Tokens) -> None:
        """Refits the routers in a separate pass over `inputs`, and writes them to the model."""
        if self._passes:
            raise RuntimeError(
                "routers are refitted between steps: passes since the last one may need them as they are"
            )
        self._followed = tokens
        try:
            with self._model.evaluating():
                self._model.model.model(**inputs)
            self._model.set_thetas(self._passes[-1][1])
            for layer in self._model.layers:
                distributed.from_first_(self._model.theta(layer).data)
        finally:
            self._followed = None
            self.clear()

    def _begin(self, *_) -> None:
        if not in_recomputation() and (torch.is_grad_enabled() or self._followed is not None):
            self._passes.append((place_in_graph(), {}))

    def _theta(self, layer: int, x_Td: Tensor) -> Tensor | None:
        """The router that the current pass uses in this layer; None for the model's own."""
        if in_recomputation():
            begun = bisect_right(self._passes, place_in_graph(), key=lambda begun: begun[0])
            return self._passes[begun - 1][1].get(layer) if begun else None
        if self._followed is None:
            return None
        with torch.no_grad():
            keep = self._followed.keep.to(x_Td.device)
            theta_Ed = self._constraint.refit(layer, x_Td[keep], self._followed)
        return self._passes[-1][1].setdefault(layer, theta_Ed.to(x_Td.dtype))
