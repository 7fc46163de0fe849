"""The anchor (ours): a frozen router, and a penalty on the change of its inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from gripmoe.constraints.base import FrozenRouter
from gripmoe.constraints.original import original_values
from gripmoe.data.documents import Batch
from gripmoe.geometry.routing import jaccard, route
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel

RATE, CEILING = 0.1, 1e4  # of `DualWeight`


class Anchored(FrozenRouter):
    """Ours: a frozen router, and on retain tokens the penalty

        lambda 10/L (sum_l ||x~_l - x_l||^2 / ||x_l||^2 + ||h~ - h||^2 / ||h||^2)

    x_l are the original router inputs, h is the final normed hidden state, and ~ marks the model that trains.
    Numerators and denominators are sums over the batch. lambda grows while the routing stability of the retain batch is
    below `routing_stability`, and falls to `floor` while it is above (`DualWeight`). With `final_only` only the last
    term counts (a control).
    """

    watches = frozenset({"retain"})
    needs_graph = True

    def __init__(self, routing_stability: float, floor: float, final_only: bool = False):
        if floor > CEILING:
            raise ConfigError(f"`anchor_floor` is {floor:g}, above the highest weight of {CEILING:g}")
        self.weight = DualWeight(1 - routing_stability, floor)
        self.final_only = final_only
        self._errors: list[float] = []  # one per retain pass since the last step
        self._observed: dict[str, float] = {}

    def start(self, model, retain) -> None:
        super().start(model, retain)
        self._layers, self._rules = model.layers, model.rules()
        self._theta_0 = model.thetas()
        self._states = original_values(model, self.original, retain, _inputs_and_final, "original states")

    def penalty(self, marked) -> Tensor:
        states_NLd = self._states.of_counted(marked.tokens)
        inputs_NLd, final_Nd = states_NLd[:, :-1], states_NLd[:, -1].float()  # fp16 overflows
        moved = mse_loss(marked.hidden_Nd.float(), final_Nd, reduction="sum")
        terms = [moved / distributed.averaged_(final_Nd.square().sum())]
        agreement = []
        for number, layer in enumerate(self._layers):
            before_Nd, now = inputs_NLd[:, number].float(), marked.routing[layer]
            with torch.autocast(before_Nd.device.type, enabled=False):
                original = route(before_Nd, self._theta_0[layer], self._rules[layer])
            own_Nk = self._rules[layer].select(now.scores_NE)  # under replay the pass used other sets
            agreement.append(jaccard(original.top_k_Nk, own_Nk).mean().item() if len(before_Nd) else 0.0)
            if not self.final_only:
                moved = mse_loss(now.x_Nd.float(), before_Nd, reduction="sum")
                terms.append(moved / distributed.averaged_(before_Nd.square().sum()))
        penalty = self.weight.value * 10 / len(self._layers) * torch.stack(terms).sum()
        stability = sum(agreement) / len(agreement) * distributed.share(len(final_Nd))
        if torch.is_grad_enabled():
            self._errors.append(1 - distributed.average(stability))
        return penalty

    def after_step(self) -> None:
        if self._errors:
            error = sum(self._errors) / len(self._errors)
            self._observed = {"anchor_weight": self.weight.value, "batch_routing_stability": 1 - error}
            self.weight.update(error)
            self._errors = []

    def skip(self) -> None:
        self._errors = []

    def observed(self) -> dict[str, float]:
        """`anchor_weight` (lambda) and `batch_routing_stability` (on retain tokens) at the last step."""
        return self._observed

    def state(self) -> dict:
        return {"weight": self.weight.value}

    def load_state(self, state: dict) -> None:
        self.weight.value = state["weight"]


def _inputs_and_final(model: MoEModel, batch: Batch) -> Tensor:
    """The inputs of every router and then the final normed hidden state, (rows, positions, L + 1, d), in the dtype of
    the hidden state."""
    with model.record_routing() as recorder:
        final = model.model.model(**batch.inputs).last_hidden_state
        trace = recorder.take()
    inputs = [trace[layer].x_Nd.unflatten(0, batch.input_ids.shape).to(final) for layer in model.layers]
    return torch.stack([*inputs, final], dim=2)


class DualWeight:
    """A multiplier that starts at 1, or at `floor` if that is more:

        lambda <- clip(lambda exp(RATE (error - allowed) / allowed), floor, CEILING)

    Without a floor the penalty fades once the error is small, and training then destroys the model.
    """

    def __init__(self, allowed: float, floor: float):
        self.allowed, self.floor = allowed, floor
        self.value = max(1.0, floor)

    def update(self, error: float) -> None:
        """Updates the weight, given the `error` of a step."""
        grown = self.value * math.exp(min(RATE * (error - self.allowed) / self.allowed, 700.0))
        self.value = min(max(grown, self.floor), CEILING)
