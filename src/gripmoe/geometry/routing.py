"""What a router selects, by how much, and how far two routings agree (Sec. 3, Eq. 2-3).

N tokens, d hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerRouting:
    """What one router saw and did: inputs x_Nd, logits scores_NE, chosen experts top_k_Nk."""

    x_Nd: Tensor
    scores_NE: Tensor
    top_k_Nk: Tensor

    def __len__(self) -> int:
        return self.x_Nd.shape[0]


RoutingTrace = dict[int, LayerRouting]  # by decoder layer


def route(x_Nd: Tensor, theta_Ed: Tensor, k: int) -> LayerRouting:
    """The routing that a linear router of weight theta_Ed would give to x_Nd."""
    scores_NE = x_Nd @ theta_Ed.T
    return LayerRouting(x_Nd, scores_NE, scores_NE.topk(k, dim=-1).indices)


def selection_mask(top_k_Nk: Tensor, num_experts: int) -> Tensor:
    """selected_NE: True where token i selects expert j; column j is the paper's index set I_j."""
    selected_NE = torch.zeros(top_k_Nk.shape[0], num_experts, dtype=torch.bool, device=top_k_Nk.device)
    return selected_NE.scatter_(1, top_k_Nk, True)


def selection_margins(scores_NE: Tensor, selected_NE: Tensor) -> Tensor:
    """margins_NE, the paper's tau: how far expert j's score lies below the lowest selected score of token i (Eq. 3).

    Zero or positive for experts outside the set; zero or negative within it, where the paper does not use it.
    """
    lowest_N1 = scores_NE.masked_fill(~selected_NE, torch.inf).amin(dim=-1, keepdim=True)
    return lowest_N1 - scores_NE


def jaccard(before_Nk: Tensor, after_Nk: Tensor) -> Tensor:
    """Jaccard similarity of two expert sets per token, shape (N,). Sets may differ in size; no index repeats."""
    shared_N = (before_Nk[:, :, None] == after_Nk[:, None, :]).sum(dim=(1, 2))
    return shared_N / (before_Nk.shape[1] + after_Nk.shape[1] - shared_N)


def routing_stability(before: RoutingTrace, after: RoutingTrace) -> dict[int, float]:
    """RS of Eq. 2 per layer: mean Jaccard similarity of the expert sets of the same tokens before and after.

    Raises ValueError if the traces cover other layers or numbers of tokens.
    """
    if before.keys() != after.keys():
        raise ValueError(f"traces cover different layers: {sorted(before)} and {sorted(after)}")
    stability = {}
    for layer in before:
        if len(before[layer]) != len(after[layer]):
            raise ValueError(f"layer {layer}: {len(before[layer])} tokens before, {len(after[layer])} after")
        stability[layer] = jaccard(before[layer].top_k_Nk, after[layer].top_k_Nk).mean().item()
    return stability


def mean_stability(stability: dict[int, float]) -> float:
    return sum(stability.values()) / len(stability)
