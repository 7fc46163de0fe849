"""Soft constraints: what is added to the loss so that routing stays, or what it depends on (Sec. 5.1, App. F, ours).

N tokens that count, d hidden size, E experts, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gripmoe import distributed
from gripmoe.config import Method
from gripmoe.constraints import FrozenRouter, RouterConstraint, Tokens, Unconstrained
from gripmoe.data.documents import Batch
from gripmoe.errors import ConfigError
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import RoutingTrace, jaccard, route, selection_mask
from gripmoe.geometry.tracking import DualWeight, RouterTracker
from gripmoe.method_a import null_space_of
from gripmoe.moe import MoEModel
from gripmoe.reference import ReferenceCache, ReferenceForward, reference_of


class RouterL2(Unconstrained):
    """What the paper describes as SEUF: an L2 penalty on the router's weights, read as on their displacement, relative
    to the squared norm of the original router and averaged over layers."""

    watches = frozenset({"retain"})

    def __init__(self, weight: float):
        self.weight = weight

    def start(self, model, forget, retain) -> None:
        self._model, self._theta_0 = model, model.thetas()

    def penalty(self, kind, seen) -> Tensor:
        moved = []
        for layer, theta_0 in self._theta_0.items():
            distance = (self._model.theta(layer).to(theta_0.device) - theta_0).square().sum()
            moved.append(distance / theta_0.square().sum())
        return self.weight * torch.stack(moved).mean()


class GateAnchor(Unconstrained):
    """SEUF (ACL 2025): forget tokens are held at the expert that is unlearned, by ||g - onehot||^2 on its layer's gate
    probabilities g. With `alone`, no other layer's router trains."""

    watches = frozenset({"forget"})
    needs_graph = True

    def __init__(self, layer: int, expert: int, weight: float, alone: bool):
        self.layer, self.expert, self.weight, self.alone = layer, expert, weight, alone

    def start(self, model, forget, retain) -> None:
        for layer in model.layers:
            model.theta(layer).requires_grad_(layer == self.layer or not self.alone)

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        return before_Ed if self.alone and layer != self.layer else after_Ed

    def penalty(self, kind, seen) -> Tensor:
        gate_NE = seen.routing[self.layer].scores_NE.softmax(dim=-1)
        wanted_E = torch.zeros_like(gate_NE[0])
        wanted_E[self.expert] = 1
        distance = (gate_NE - wanted_E).square().sum(dim=-1).mean()
        return self.weight * distance * distributed.share(len(gate_NE))


def attributed_expert(trace: RoutingTrace, layers: Sequence[int]) -> tuple[int, int]:
    """SEUF's attribution: the (layer, expert) of the network with the highest gate probability, averaged over the
    forget tokens of `trace` with 0 where it is not selected; among `layers`, those that the objective can train."""
    scores = {}
    for layer in layers:
        seen = trace[layer]
        selected_NE = selection_mask(seen.top_k_Nk, seen.scores_NE.shape[1])
        gate_E = (seen.scores_NE.softmax(dim=-1) * selected_NE).mean(dim=0)
        scores |= {(layer, expert): score for expert, score in enumerate(gate_E.tolist())}
    return max(scores, key=scores.get)


class RoutingScores(Unconstrained):
    """A routing-preservation loss: squared distance between the original and the current router scores of retain
    tokens, relative to the variance of the original ones; its gradient reaches the experts below each router."""

    watches = frozenset({"retain"})
    needs_graph = True

    def __init__(self, weight: float):
        self.weight = weight

    def start(self, model, forget, retain) -> None:
        self._layers = model.layers
        scores = partial(_per_layer, field="scores_NE")
        self._scores = reference_of(model, self.original, retain, scores, "original scores")

    def penalty(self, kind, seen) -> Tensor:
        wanted_NLE = _of(self._scores, seen.tokens)
        distances = []
        for number, layer in enumerate(self._layers):
            wanted_NE = wanted_NLE[:, number]
            moved = (seen.routing[layer].scores_NE - wanted_NE).square().sum() / max(1, wanted_NE.numel())
            distances.append(moved / distributed.gathered(wanted_NE).var())
        return self.weight * torch.stack(distances).mean() * distributed.share(len(wanted_NLE))


class Anchored(FrozenRouter):
    """Ours: a frozen router and inputs that stay. On retain tokens the loss gets

        lambda 10/L (sum_l ||x~_l - x_l||^2 / ||x_l||^2 + ||h~ - h||^2 / ||h||^2)

    with x_l the original router inputs, h the final normed hidden state, ratios of sums over the batch. lambda is a
    dual variable: it grows while the routing stability of the retain batch is below `routing_stability`, and falls to
    `floor` while it is above. With `final_only` just the last term counts (a control). With `tracked` the router is not
    frozen but refitted within the retain forward, layer by layer, by recursive least squares on its tokens.
    """

    watches = frozenset({"retain"})
    needs_graph = True

    def __init__(self, routing_stability: float, floor: float, final_only: bool = False, tracked: bool = False):
        if not 0 < routing_stability < 1:
            raise ConfigError(
                f"`routing_stability` must lie between 0 and 1, both excluded, not at {routing_stability}"
            )
        self.weight = DualWeight(1 - routing_stability, floor)
        self.final_only = final_only
        self.refits = tracked
        self._trackers: dict[int, RouterTracker] = {}
        self._errors: list[float] = []  # of the passes since the last step
        self._observed: dict[str, float] = {}
        self._asked: tuple[Tokens, Tensor] | tuple[None, None] = None, None  # of the pass under way, original states

    def start(self, model, forget, retain) -> None:
        super().start(model, forget, retain)
        self._layers, self._rules = model.layers, model.rules()
        self._theta_0 = model.thetas()
        if self.refits:
            self._trackers = {layer: RouterTracker(theta) for layer, theta in self._theta_0.items()}
        self._states = reference_of(model, self.original, retain, _inputs_and_final, "original states")

    def refit(self, layer, x_Nd, tokens) -> Tensor:
        if layer == self._layers[0]:
            self._asked = tokens, _of(self._states, tokens)
        wanted_NE = self._asked[1][:, self._layers.index(layer)].float() @ self._theta_0[layer].T
        return self._trackers[layer].update(distributed.gathered(x_Nd), distributed.gathered(wanted_NE))

    def penalty(self, kind, seen) -> Tensor:
        tokens, states_NLd = self._asked
        self._asked = None, None
        if tokens is not seen.tokens:
            states_NLd = _of(self._states, seen.tokens)
        inputs_NLd, final_Nd = states_NLd[:, :-1], states_NLd[:, -1]
        terms = [(seen.hidden_Nd - final_Nd).square().sum() / distributed.averaged_(final_Nd.square().sum())]
        agreement = []
        for number, layer in enumerate(self._layers):
            before_Nd, now = inputs_NLd[:, number].float(), seen.routing[layer]
            original = route(before_Nd, self._theta_0[layer], self._rules[layer])
            own_Nk = self._rules[layer].select(now.scores_NE)  # under replay not what the pass used
            agreement.append(jaccard(original.top_k_Nk, own_Nk).mean().item() if len(before_Nd) else 0.0)
            if not self.final_only:
                moved = (now.x_Nd - before_Nd).square().sum()
                terms.append(moved / distributed.averaged_(before_Nd.square().sum()))
        penalty = self.weight.value * 10 / len(self._layers) * torch.stack(terms).sum()
        stability = sum(agreement) / len(agreement) * distributed.share(len(final_Nd))
        if torch.is_grad_enabled():
            self._errors.append(1 - distributed.average(stability))
        return penalty

    def constrain(self, layer, before_Ed, after_Ed, seen) -> Tensor:
        if self._errors:  # once in a step, however many passes it took
            error = sum(self._errors) / len(self._errors)
            self._observed = {"anchor_weight": self.weight.value, "batch_routing_stability": 1 - error}
            self.weight.update(error)
            self._errors = []
        return self._trackers[layer].theta_Ed.to(before_Ed) if self.refits else before_Ed

    def observed(self) -> dict[str, float]:
        """`anchor_weight`, lambda of the last step, and `batch_routing_stability`, what its retain tokens had kept."""
        return self._observed

    def state(self) -> dict:
        trackers = {layer: tracker.state() for layer, tracker in self._trackers.items()}
        return {"weight": self.weight.value, "trackers": trackers}

    def load_state(self, state: dict) -> None:
        if state:
            self.weight.value = state["weight"]
            for layer, tracked in state["trackers"].items():
                self._trackers[layer].load_state(tracked)


def _of(reference: ReferenceCache | ReferenceForward, tokens: Tokens) -> Tensor:
    """What the original model said of the tokens that count, (N, ...)."""
    return reference.of(tokens.input_ids, tokens.attention_mask).flatten(0, 1)[tokens.keep]


def _per_layer(model: MoEModel, batch: Batch, field: str) -> Tensor:
    """What every router saw or computed, (rows, positions, L, d or E)."""
    with model.record_routing() as recorder:
        model.model.model(**batch.inputs)
        trace = recorder.take()
    per_layer = [getattr(trace[layer], field) for layer in model.layers]
    return torch.stack([tensor.unflatten(0, batch.input_ids.shape) for tensor in per_layer], dim=2)


def _inputs_and_final(model: MoEModel, batch: Batch) -> Tensor:
    """What every router saw and, last, the final normed hidden state, (rows, positions, L + 1, d), in its dtype."""
    with model.record_routing() as recorder:
        final = model.model.model(**batch.inputs).last_hidden_state
        trace = recorder.take()
    inputs = [trace[layer].x_Nd.unflatten(0, batch.input_ids.shape).to(final) for layer in model.layers]
    return torch.stack([*inputs, final], dim=2)


def constraint_of(
    method: Method,
    reference: RoutingTrace,
    bases: Mapping[int, RetainBasis] | None,
    attributed: tuple[int, int] | None,
    seed: int,
) -> RouterConstraint:
    """The constraint of a row of methods.yaml, hard or soft; `attributed` is the expert that a gate anchor names."""
    if method.constraint == "router_l2":
        return RouterL2(method.weight)
    if method.constraint == "gate_anchor":
        return GateAnchor(*attributed, method.weight, alone=method.experts == "top_attributed")
    if method.constraint == "routing_scores":
        return RoutingScores(method.weight)
    if method.constraint == "anchor":
        return Anchored(method.routing_stability, method.anchor_floor, method.final_only, method.tracked)
    if method.constraint == "null_space":
        return null_space_of(method, reference, bases, seed)
    return FrozenRouter() if method.constraint == "frozen" else Unconstrained()
