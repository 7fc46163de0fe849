"""What a router selects, by how much, and how far two routings agree (Eq. 2, Sec. 3; Eq. 3, Sec. 4.1).

N tokens, d hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerRouting:
        return LayerRouting(function(self.x_Nd), function(self.scores_NE), function(self.top_k_Nk))

    def to(self, device: torch.device | str) -> LayerRouting:
        return self.map(lambda values: values.to(device))

    @staticmethod
    def joined(parts: Sequence[LayerRouting]) -> LayerRouting:
        """The tokens of all parts, one after the other; of a single part the part itself."""
        if len(parts) == 1:
            return parts[0]
        fields = ("x_Nd", "scores_NE", "top_k_Nk")
        return LayerRouting(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))


RoutingTrace = Mapping[int, LayerRouting]  # by decoder layer


@dataclass(frozen=True)
class SelectionRule:
    """How a linear router turns logits into sets (Sec. 3): the `k` largest choice scores, and what some families add.

    Choice scores are the logits, or their sigmoid or softmax (`scoring`), plus `correction_bias_E` if there is one,
    which balances load. `logit_bias_E` is part of the logits. With `num_groups` > 1 only experts of the
    `chosen_groups` best groups may be selected; a group's score is the sum of its `counted` largest choice scores.
    Raises ValueError for another `scoring`.
    """

    k: int
    logit_bias_E: Tensor | None = None
    correction_bias_E: Tensor | None = None
    scoring: str = "none"  # none | sigmoid | softmax
    num_groups: int = 1
    chosen_groups: int = 1
    counted: int = 1

    def __post_init__(self) -> None:
        if self.scoring not in ("none", "sigmoid", "softmax"):
            raise ValueError(f"`scoring` is {self.scoring!r}: give 'none', 'sigmoid' or 'softmax'")

    def scores(self, x_Nd: Tensor, theta_Ed: Tensor) -> Tensor:
        """The logits, (N, E), with their bias."""
        scores_NE = x_Nd @ theta_Ed.T
        return scores_NE if self.logit_bias_E is None else scores_NE + self.logit_bias_E.to(scores_NE)

    def choice(self, scores_NE: Tensor) -> Tensor:
        """The choice scores, groups aside."""
        if self.scoring == "sigmoid":
            scores_NE = scores_NE.sigmoid()
        elif self.scoring == "softmax":
            scores_NE = scores_NE.softmax(dim=-1)
        return scores_NE if self.correction_bias_E is None else scores_NE + self.correction_bias_E.to(scores_NE)

    def select(self, scores_NE: Tensor, without_E: Tensor | None = None) -> Tensor:
        """The chosen experts, (N, k). Those that `without_E`, bool of shape (E,), marks are never chosen."""
        choice_NE = self.choice(scores_NE)
        if without_E is not None:
            choice_NE = choice_NE.masked_fill(without_E.to(choice_NE.device), -torch.inf)
        if self.num_groups > 1:
            choice_NE = choice_NE.masked_fill(~self._in_chosen_groups(choice_NE), -torch.inf)
        return choice_NE.topk(self.k, dim=-1).indices

    def can_do_without(self, without_E: Tensor) -> bool:
        """Whether k experts are left that `without_E`, (E,), does not mark, whichever groups are chosen."""
        left = (~without_E).view(self.num_groups, -1).sum(dim=1).sort().values
        return bool(left[: self.chosen_groups].sum() >= self.k)

    def fixed(self, scores_NE: Tensor, top_k_Nk: Tensor) -> Tensor:
        """True for each score that must not change, or the token's set might, (N, E). These are the scores of its
        chosen experts (the paper's I_j). With groups, also those that make up a chosen group's score. With a bias on
        softmax probabilities, all, because each score moves every probability."""
        fixed_NE = selection_mask(top_k_Nk, scores_NE.shape[1])
        if self.scoring == "softmax" and self._is_biased:
            return torch.ones_like(fixed_NE)
        if self.num_groups > 1:
            choice_NE = self.choice(scores_NE)
            best = choice_NE.unflatten(1, (self.num_groups, -1)).topk(self.counted, dim=-1).indices
            carries = torch.zeros_like(fixed_NE).unflatten(1, (self.num_groups, -1)).scatter(2, best, True).flatten(1)
            fixed_NE = fixed_NE | (carries & self._in_chosen_groups(choice_NE))
        return fixed_NE

    def margins(self, scores_NE: Tensor, top_k_Nk: Tensor) -> Tensor:
        """margins_NE, the paper's tau (Eq. 3): by how much a score may rise before its expert is selected; zero outside
        the chosen groups, where an expert could otherwise carry its group. Meaningless where scores are `fixed`."""
        selected_NE = selection_mask(top_k_Nk, scores_NE.shape[1])
        if self.scoring == "none":
            margins_NE = selection_margins(self.choice(scores_NE), selected_NE)
        elif not self._is_biased:  # probabilities have the order of their logits
            margins_NE = selection_margins(scores_NE, selected_NE)
        else:
            # The probability at which expert j would tie, as a logit; one or more is never reached. In fp64, because
            # fp32 rounds the probabilities of large logits to 1.
            logits_NE = scores_NE.double()
            tie_NE = selection_margins(self.choice(logits_NE), selected_NE) + logits_NE.sigmoid()
            margins_NE = (tie_NE.clamp(0, 1).logit() - logits_NE).to(scores_NE.dtype)
        if self.num_groups > 1:
            margins_NE = torch.where(self._in_chosen_groups(self.choice(scores_NE)), margins_NE, 0)
        return margins_NE

    @property
    def _is_biased(self) -> bool:
        return self.correction_bias_E is not None and bool(self.correction_bias_E.any())

    def _in_chosen_groups(self, choice_NE: Tensor) -> Tensor:
        grouped = choice_NE.unflatten(1, (self.num_groups, -1))
        best = grouped.topk(self.counted, dim=-1).values.sum(dim=-1).topk(self.chosen_groups, dim=-1).indices
        chosen = selection_mask(best, self.num_groups)
        return chosen[..., None].expand_as(grouped).flatten(1)


def route(x_Nd: Tensor, theta_Ed: Tensor, rule: SelectionRule) -> LayerRouting:
    """The routing that a linear router of weight theta_Ed would give to x_Nd."""
    scores_NE = rule.scores(x_Nd, theta_Ed)
    return LayerRouting(x_Nd, scores_NE, rule.select(scores_NE))


def selection_mask(top_k_Nk: Tensor, num_experts: int) -> Tensor:
    """selected_NE: True where token i selects expert j; column j is the paper's index set I_j."""
    selected_NE = torch.zeros(top_k_Nk.shape[0], num_experts, dtype=torch.bool, device=top_k_Nk.device)
    return selected_NE.scatter_(1, top_k_Nk, True)


def selection_margins(scores_NE: Tensor, selected_NE: Tensor) -> Tensor:
    """How far expert j's score lies below the lowest selected score of token i (Eq. 3); not positive within the set."""
    lowest_N1 = scores_NE.masked_fill(~selected_NE, torch.inf).amin(dim=-1, keepdim=True)
    return lowest_N1 - scores_NE


def jaccard(before_Nk: Tensor, after_Nk: Tensor) -> Tensor:
    """Jaccard similarity of two expert sets per token, shape (N,). Sets may differ in size; no index repeats."""
    shared_N = (before_Nk[:, :, None] == after_Nk[:, None, :]).sum(dim=(1, 2))
    return shared_N / (before_Nk.shape[1] + after_Nk.shape[1] - shared_N)


def stability_by_layer(before: RoutingTrace, after: RoutingTrace) -> dict[int, float]:
    """RS of Eq. 2 per layer. Raises ValueError if the traces cover different layers or numbers of tokens."""
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
