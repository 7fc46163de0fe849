"""Random routing: a control that shows how much the choice of experts matters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gripmoe.moe.forcing import Routes
from gripmoe.moe.model import MoEModel


def random_sets(model: MoEModel, seed: int) -> Callable[..., Routes]:
    """Routes with uniformly random distinct experts for every token: the control of expert forcing."""
    generator = torch.Generator().manual_seed(seed)

    def routes(input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        shape = (input_ids.numel(), model.num_experts)
        return {
            layer: torch.rand(shape, generator=generator).topk(model.top_k, dim=-1).indices for layer in model.layers
        }

    return routes
