"""Constraints of other papers: router L2, SEUF's gate anchor and single expert, routing scores (Sec. 5.1, App. F).

N tokens that count, d hidden size, E experts, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gripmoe.constraints.base import RouterConstraint
from gripmoe.constraints.original import original_values
from gripmoe.geometry.routing import RoutingTrace, selection_mask
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.modes import freeze
from gripmoe.moe.recording import hooked
from gripmoe.moe.states import router_states


class RouterL2(RouterConstraint):
    """What the paper describes as SEUF: an L2 penalty on the routers' displacement, relative to the squared norm of the
    original router and averaged over layers."""

    watches = frozenset({"retain"})

    def __init__(self, weight: float):
        self.weight = weight

    def start(self, model, retain) -> None:
        model.freeze_router_biases()  # which the penalty does not see
        self._model, self._theta_0 = model, model.thetas()

    def penalty(self, marked) -> Tensor:
        moved = []
        for layer, theta_0 in self._theta_0.items():
            distance = (self._model.theta(layer).to(theta_0.device) - theta_0).square().sum()
            moved.append(distance / theta_0.square().sum())
        return self.weight * torch.stack(moved).mean()


class GateAnchor(RouterConstraint):
    """SEUF (ACL 2025): the penalty ||g - onehot||^2 on the gate probabilities g of forget tokens makes the router of
    `layer` send them to `expert`, which is unlearned. With `alone`, the routers of all other layers are frozen."""

    watches = frozenset({"forget"})
    needs_graph = True

    def __init__(self, layer: int, expert: int, weight: float, alone: bool):
        self.layer, self.expert, self.weight, self.alone = layer, expert, weight, alone

    def start(self, model, retain) -> None:
        require_softmax_gates(model)
        others = [layer for layer in model.layers if self.alone and layer != self.layer]
        freeze(parameter for layer in others for parameter in model.router_parameters(layer))

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        return before_Ed if self.alone and layer != self.layer else after_Ed

    def penalty(self, marked) -> Tensor:
        gate_NE = marked.routing[self.layer].scores_NE.softmax(dim=-1)
        wanted_E = gate_NE.new_zeros(gate_NE.shape[1])
        wanted_E[self.expert] = 1
        distance = (gate_NE - wanted_E).square().sum() / max(1, len(gate_NE))  # a process may have no forget rows
        return self.weight * distance * distributed.share(len(gate_NE))


def require_softmax_gates(model: MoEModel) -> None:
    """Raises ConfigError where a high softmax probability of an expert does not mean that its router selects it."""
    for rule in model.rules().values():
        if rule.correction_bias_E is not None or rule.num_groups > 1:
            raise ConfigError(
                "SEUF leads tokens to an expert by the softmax of router scores, and routers of this "
                f"{type(model.model).__name__} select by biases or groups: take another method"
            )


def attributed_expert(trace: RoutingTrace, layers: Sequence[int]) -> tuple[int, int]:
    """SEUF's attribution: the (layer, expert) with the highest mean gate probability over the forget tokens of `trace`.
    The probability counts as 0 where the expert is not selected. `layers` are those that the objective can train."""
    scores = {}
    for layer in layers:
        seen = trace[layer]
        selected_NE = selection_mask(seen.top_k_Nk, seen.scores_NE.shape[1])
        gate_E = (seen.scores_NE.softmax(dim=-1) * selected_NE).mean(dim=0)
        scores |= {(layer, expert): score for expert, score in enumerate(gate_E.tolist())}
    return max(scores, key=scores.get)


class RoutingScores(RouterConstraint):
    """A routing-preservation loss: the squared distance between original and current router scores of retain tokens,
    relative to the variance of the original scores. Its gradient reaches the experts below each router."""

    watches = frozenset({"retain"})
    needs_graph = True

    def __init__(self, weight: float):
        self.weight = weight

    def start(self, model, retain) -> None:
        self._layers = model.layers
        scores = partial(router_states, field="scores_NE")
        self._scores = original_values(model, self.original, retain, scores, "original scores")

    def penalty(self, marked) -> Tensor:
        wanted_NLE = self._scores.of_counted(marked.tokens)
        distances = []
        for number, layer in enumerate(self._layers):
            wanted_NE = wanted_NLE[:, number]
            moved = (marked.routing[layer].scores_NE - wanted_NE).square().sum() / max(1, wanted_NE.numel())
            distances.append(moved / distributed.gathered(wanted_NE).var())
        return self.weight * torch.stack(distances).mean() * distributed.share(len(wanted_NLE))


@contextmanager
def restricted_experts(
    model: MoEModel, scope: Mapping[int, Iterable[int]], optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Within the block, of all experts only those of `scope` (by layer) change. Shared experts, and experts of layers
    without one in `scope`, are frozen. In the other layers, gradients of other experts are zeroed, and changes by
    weight decay or momentum are undone after each step."""
    experts = {layer: [p for p in model.expert_parameters(layer) if p.requires_grad] for layer in scope if scope[layer]}
    training = {id(parameter) for of_layer in experts.values() for parameter in of_layer}
    others = [parameter for layer in model.layers for parameter in model.other_parameters(layer)]
    frozen = [parameter for parameter in others if parameter.requires_grad and id(parameter) not in training]
    masks: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # a parameter, its experts that train, and its first values
    for layer, of_layer in experts.items():
        for parameter in of_layer:
            chosen = torch.zeros(model.num_experts, dtype=torch.bool, device=parameter.device)
            chosen[list(scope[layer])] = True
            chosen = chosen.view(-1, *[1] * (parameter.ndim - 1))
            masks.append((parameter, chosen, parameter.detach().clone()))

    @torch.no_grad()
    def restore(*_):
        for parameter, chosen, first in masks:
            parameter.copy_(torch.where(chosen, parameter, first))

    freeze(frozen)
    try:
        handles = [p.register_hook(lambda grad, m=m: grad * m) for p, m, _ in masks]
        with hooked([*handles, optimizer.register_step_post_hook(restore)]):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
