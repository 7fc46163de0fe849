"""The workflow's training step on one model with one optimizer, taken by several methods in turns; and the least that a
method's arithmetic takes of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gripmoe import distributed
from gripmoe.clock import now
from gripmoe.config import Method, Training
from gripmoe.constraints import RouterConstraint, Unconstrained
from gripmoe.data.documents import Batch
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import RoutingTrace
from gripmoe.guard import RouterGuard
from gripmoe.moe import MoEModel
from gripmoe.objectives import Objective, make_objective
from gripmoe.penalties import attributed_expert, constraint_of
from gripmoe.unlearning import _adamw, _trainable


def elapsed(function: Callable[[], object], rounds: int = 1) -> float:
    """Seconds, the median over rounds."""
    times = []
    for _ in range(rounds):
        started = now()
        function()
        times.append(now() - started)
    return statistics.median(times)


@dataclass
class Side:
    """What holds the routers of a step, which parameters train in it, and its routers after the step before."""

    constraint: RouterConstraint
    trained: set[nn.Parameter]
    thetas: dict[int, Tensor]
    scope: dict[int, list[int]] | None = None


class Loop:
    """The workflow's training step on one model with one optimizer, under whichever side takes it."""

    def __init__(self, model: PreTrainedModel, training: Training, forget: Sequence[Batch], retain: Sequence[Batch]):
        self.moe, self.training, self.forget, self.retain = MoEModel(model), training, forget, retain
        routers, experts = _trainable(self.moe, None, self.moe.all_layers)
        self.parameters = routers + experts
        self.optimizer = _adamw(routers, experts, training)
        self.objective: Objective = make_objective("gd", training.objective, seed=0)
        self.objective.start(self.moe, forget, retain)
        self.guard = RouterGuard(self.moe, self.optimizer, Unconstrained())
        self.theta_0 = self.moe.thetas()
        self.reference: RoutingTrace = self.moe.trace(retain, device="cpu")
        self.free = Side(Unconstrained(), set(self.parameters), self.theta_0)
        self.number = 0
        self.tokens = forget[0].input_ids.numel() + retain[0].input_ids.numel()  # of a step
        if training.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def side(self, method: Method, skew: int = 1) -> Side:
        """A method at its start, with bases in which one expert of each layer has `skew` times its even share."""
        moe = self.moe
        moe.model.eval()
        moe.set_thetas(self.theta_0)
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        attributed = scope = None
        if method.constraint == "gate_anchor":
            attributed = attributed_expert(moe.trace(self.forget, device="cpu"), moe.layers)
        bases = random_bases(moe, method, held_tokens(self.reference), skew) if method.has_bases else None
        constraint = constraint_of(method, self.reference, bases, attributed, seed=0)
        constraint.start(moe, self.forget, self.retain)
        trained = {parameter for parameter in self.parameters if parameter.requires_grad}
        if method.experts == "top_attributed":
            scope = {attributed[0]: [attributed[1]]}
            routers = {moe.theta(layer) for layer in moe.layers}
            trained = trained & routers | set(moe.expert_parameters(attributed[0]))
        return Side(constraint, trained, self.theta_0, scope)

    def renew_guard(self) -> None:
        """What an interrupted step has left in the guard goes with it."""
        self.guard.close()
        self.guard = RouterGuard(self.moe, self.optimizer, Unconstrained())

    def step(self, side: Side) -> float:
        """Seconds of one step."""
        moe, guard, optimizer = self.moe, self.guard, self.optimizer
        forget, retain = (own[self.number // 2 % len(own)] for own in (self.forget, self.retain))
        self.number += 1
        moe.model.train()
        moe.set_thetas(side.thetas)
        guard.constraint = side.constraint
        for parameter in self.parameters:
            parameter.requires_grad_(parameter in side.trained)
        with moe.restrict_experts(side.scope, optimizer) if side.scope else nullcontext():
            started = now()
            optimizer.zero_grad()
            with guard.forget():
                loss = self.objective.forget_loss(moe, forget)
            (loss + guard.penalty()).backward()
            with guard.retain():
                loss = self.objective.retain_loss(moe, retain)
            (self.objective.alpha * loss + guard.penalty()).backward()
            distributed.clip_gradients(self.parameters, self.training.clip_norm)
            optimizer.step()
            taken = now() - started
        side.thetas = moe.thetas()
        return taken


def held_tokens(trace: RoutingTrace) -> int:
    return len(next(iter(trace.values())))


def random_bases(moe: MoEModel, method: Method, tokens: int, skew: int = 1) -> dict[int, RetainBasis]:
    """Of each layer bases in fp32 of its own, though all are alike: as wide as those of its first expert, which has
    `skew` times the even share of the tokens that every other has."""
    bases = moe.num_experts if method.granularity == "expert" else 1
    share = tokens * moe.top_k // moe.num_experts if bases > 1 else tokens
    shape = (bases, moe.hidden_size, min(moe.hidden_size, skew * share))
    U_Edr = torch.linalg.qr(torch.randn(shape, device=moe.model.device)).Q.contiguous()
    U_Edr[1:, :, share:] = 0
    return {layer: RetainBasis(U_Edr.clone()) for layer in moe.layers}


def rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second of a copy, read and written, and flops per second of a product in fp64."""
    on_gpu = device.type == "cuda"
    source = torch.zeros(2**30 if on_gpu else 2**24, dtype=torch.uint8, device=device)
    target, size = torch.empty_like(source), 4096 if on_gpu else 256
    square = torch.ones(size, size, dtype=torch.float64, device=device)
    square @ square  # the first product loads what makes it
    return 2 * len(source) / elapsed(lambda: target.copy_(source), 5), 2 * size**3 / elapsed(lambda: square @ square, 5)


def floor(side: Side, method: Method, moe: MoEModel, tokens: int, speed: tuple[float, float]) -> float | None:
    """Seconds that the constraint's arithmetic takes at least in a step with `tokens` retain tokens that count: every
    input is read and every result written once. None where it was not counted.

    Method A: one product of all retain tokens with all routers, one pass over the bases. Tracked router: tokens enter
    the Gram matrix and the cross products, one Cholesky factor, one solve. Tracked bases: tokens enter the triangular
    factors by QR (no decomposition is counted), one pass over them.
    """
    d, E, k = moe.hidden_size, moe.num_experts, moe.top_k
    if method.has_bases:
        U_Edr, N = side.constraint.bases[moe.layers[0]].U_ret_Edr, held_tokens(side.constraint.reference)
        work = U_Edr.nbytes + 4 * N * (d + E), 2 * N * d * E + 4 * d * E * U_Edr.shape[2]
    elif method.constraint == "anchor" and method.tracked:
        flops = 2 * d * d * (tokens + E) + d**3 / 3 + 4 * tokens * E * d
        work = 8 * (4 * d * d + 4 * E * d) + 4 * tokens * (d + E), flops
    elif method.basis == "tracked":
        work = 8 * 2 * E * d * d + 4 * tokens * d, 2 * tokens * k * d * d + 4 * E * d * d
    else:
        return None
    return len(moe.layers) * max(amount / rate for amount, rate in zip(work, speed, strict=True))
