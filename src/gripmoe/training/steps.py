"""One step of unlearning: the gradients of both losses under the constraint, then AdamW's update; and its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gripmoe.config.training import Training
from gripmoe.constraints.expert_null_space import ExpertNullSpace
from gripmoe.constraints.hooks import ConstraintHandle, Diverged
from gripmoe.constraints.original import OriginalSets
from gripmoe.data.documents import Batch
from gripmoe.io import distributed
from gripmoe.io.clock import now
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.fp8 import expert_precision
from gripmoe.moe.modes import restored
from gripmoe.training.adversary import RelearningAdversary, uphill
from gripmoe.training.averaging import WeightAverage
from gripmoe.training.forget_gradient import ForgetGradientEdit, disruption_masked
from gripmoe.training.objectives import Objective, cross_entropy
from gripmoe.training.optimizers import rate_zero
from gripmoe.training.step_batches import StepBatches

TIMED_PAIRS = 8
ADVERSARY_SEED = 500_000  # added to a run's own: the adversary draws documents in another order than the steps


@dataclass
class Steps:
    """Steps of training: gradients of both losses, under the constraint, then AdamW's update."""

    model: MoEModel
    objective: Objective
    batches: StepBatches
    training: Training
    routers: list[nn.Parameter]
    experts: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    in_linear_precision: Callable[[], AbstractContextManager[None]]
    original_sets: OriginalSets | None
    adversary: RelearningAdversary | None
    forget_edits: list[ForgetGradientEdit]
    expert_null_space: ExpertNullSpace | None
    average: WeightAverage | None
    handle: ConstraintHandle
    tokens: int

    def take(self, step: int) -> dict[str, float] | None:
        """Trains a step; returns its losses and gradients, or None if the run has diverged: a loss, a gradient or a
        router is not finite, or the retain loss exceeds its bound."""
        seed = 1_000_000 * self.batches.seed + step
        torch.manual_seed(seed)  # of dropout, the same when resumed
        self.model.model.train()
        self.optimizer.zero_grad()
        try:
            alpha = self.training.alpha_multiplier * self.objective.alpha
            with self._at_forget_weights(step) as relearned:
                forget_loss = self._backward("forget", self.objective.forget_loss, step, 1.0)
            edited = {name: number for edit in self.forget_edits for name, number in edit().items()}
            masked = self.training.disruption_mask
            with disruption_masked(self.routers + self.experts) if masked else nullcontext():
                retain_loss = self._backward("retain", self.objective.retain_loss, step, alpha)
            losses = {"forget_loss": forget_loss.item(), "retain_loss": retain_loss.item(), **self.objective.monitor}
            losses |= relearned | edited
            losses = {name: distributed.average(float(loss)) for name, loss in losses.items()}
            norms = [_gradient_norm(parameters) for parameters in (self.routers, self.experts)]
            gradients = dict(zip(("router_gradient", "expert_gradient"), (rms for _, rms in norms), strict=True))
            if not all(map(math.isfinite, (losses["forget_loss"], *gradients.values()))):
                return None
            self.handle.check(losses["retain_loss"])
            norm = math.hypot(*(norm for norm, _ in norms))
            distributed.clip_gradients(self.routers + self.experts, self.training.clip_norm, norm)
            torch.manual_seed(seed)  # of stochastic rounding, the same in all processes
            self.optimizer.step()  # whose hooks keep the routers feasible
            if self.expert_null_space and not self.handle.is_lifted:
                self.expert_null_space.project()
            if self.average:
                self.average.update()
        except Diverged:
            return None
        return {**losses, **gradients}

    def _backward(
        self, kind: str, loss_of: Callable[[MoEModel, Batch], Tensor], step: int, weight: float, marks: bool = True
    ) -> Tensor:
        """The loss, mean over the passes of the step; without `marks` the constraint does not see them."""
        passes, losses = self.training.gradient_accumulation, []
        for number in range(passes):
            batch, marked = self.batches.of(kind, step, number), getattr(self.handle, kind) if marks else nullcontext
            self.tokens += int(batch.attention_mask.sum())
            with self._as_trained(batch):  # in the backward pass too, which may compute activations again
                with self._needed_layers(kind), marked():
                    loss = loss_of(self.model, batch)
                _require_loss(loss, f"objective {type(self.objective).__name__}: the {kind} loss")
                ((weight * loss + self.handle.penalty()) / passes).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @contextmanager
    def _at_forget_weights(self, step: int) -> Iterator[dict[str, float]]:
        """Within the block the model has the weights where the forget gradient is taken: those of the adversary,
        which relearned before it, those uphill of its own (SAM), or its own. Gives the adversary's last loss."""
        if radius := self.training.sharpness_radius:
            self._backward("forget", self.objective.forget_loss, step, 1.0, marks=False)
            with uphill(self.routers + self.experts, radius):
                yield {}
            return
        if self.adversary is None:
            yield {}
            return
        if step % self.training.adversary_restart == 0:
            self.adversary.restart()
        steps = self.training.adversary_steps
        theirs = replace(self.batches, seed=self.batches.seed + ADVERSARY_SEED)
        with self.adversary.weights():
            for number in range(steps):
                batch = replace(theirs.of("forget", step * steps + number), scored_per_pass=None)  # a step of one pass
                self.tokens += int(batch.attention_mask.sum())
                loss = self.adversary.relearn(partial(cross_entropy, self.model, batch))
            yield {"adversary_loss": loss}

    @contextmanager
    def _as_trained(self, batch: Batch) -> Iterator[None]:
        with ExitStack() as entered:
            entered.enter_context(expert_precision(self.model, self.training.expert_precision))
            entered.enter_context(self.in_linear_precision())
            if self.original_sets and not self.handle.is_lifted:
                entered.enter_context(self.model.force_routing(self.original_sets.of(**batch.inputs)))
            yield

    def _needed_layers(self, kind: str) -> AbstractContextManager:
        if self.objective.last_layer is None or kind in self.handle.watches:
            return nullcontext()
        return self.model.only_layers(self.objective.last_layer + 1)

    def seconds_by_turns(self) -> tuple[float, float] | None:
        """Seconds of a step under the constraint, averaged over the steps from one projection to the next, and of one
        without it. Each comes from the shortest of TIMED_PAIRS, since other load of the machine only adds. Routers move
        in the steps with the constraint, or there would be nothing to constrain. None if a step diverged. The routers,
        and experts that are projected, are restored."""
        pairs = []
        *others, of_routers = self.optimizer.param_groups
        constraint = self.handle.constraint
        every, constraint.every = constraint.every, 1  # each timed step is constrained
        try:
            with restored(self.routers + (self.experts if self.expert_null_space else [])), rate_zero(others):
                for _ in range(TIMED_PAIRS):
                    constrained = self._seconds()
                    with self.handle.lifted(), rate_zero([of_routers]):
                        pairs.append((constrained, self._seconds()))
        finally:
            constraint.every = every
        if not pairs or any(None in pair for pair in pairs):
            return None
        constrained, plain = map(min, zip(*pairs, strict=True))
        return plain + (constrained - plain) / every, plain

    def _seconds(self) -> float | None:
        started = now()
        # None for a step that diverges: a rate of zero does not keep what is not finite out of the weights
        return None if self.take(step=0) is None else now() - started


def _require_loss(loss: Any, what: str) -> None:
    """Raises ConfigError if an objective has returned what no gradient can be taken of."""
    if not isinstance(loss, Tensor):
        raise ConfigError(f"{what} is a {type(loss).__name__}; return a tensor")
    if loss.numel() != 1:
        raise ConfigError(f"{what} has shape {tuple(loss.shape)}; return one number, as a mean over tokens")
    if not loss.requires_grad:
        raise ConfigError(f"{what} has no graph; compute it from the model's outputs, without `detach` or `item`")


def _gradient_norm(parameters: list[nn.Parameter]) -> tuple[float, float]:
    """The norm of all gradients, and their root mean square."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0, 0.0
    norm = distributed.total_norm(gradients).item()
    return norm, norm / math.sqrt(sum(g.numel() for g in gradients))
