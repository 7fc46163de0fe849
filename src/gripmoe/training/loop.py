"""The unlearning loop: objective, router constraint, stop at matched forgetting, resume (Sec. 4, App. A)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from gripmoe.config.training import Training
from gripmoe.constraints.base import RouterConstraint
from gripmoe.constraints.hooks import ConstraintHandle, Diverged
from gripmoe.constraints.original import OriginalCache, OriginalSets
from gripmoe.data.corpora import Corpora, epoch_rows
from gripmoe.data.documents import Batch, Row, collate, length_buckets
from gripmoe.evaluation.stop_rule import StopRule
from gripmoe.io import distributed
from gripmoe.io.clock import now
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.fp8 import expert_precision, linear_precision
from gripmoe.training.checkpoint import load_state, save_state
from gripmoe.training.objectives import Objective
from gripmoe.training.optimizers import make_adamw, rate_zero
from gripmoe.training.token_weights import routing_aware_weights

TOKENS_PER_PASS = 4000  # padded, where nothing is trained
TIMED_PAIRS = 8


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "reached" the forget target, "not_reached" within the steps, or "diverged"; and its history.

    A history row has the step, the dev scores there and, after the first, means since the row before: losses,
    root-mean-square gradient per element of routers and experts, and seconds per step. `seconds` are those of a step
    under the constraint and of one without it, taken in turns at the end; None where the run diverged, or would.
    """

    status: str
    steps: int
    history: list[dict[str, float]]
    seconds: tuple[float, float] | None

    @property
    def costs(self) -> dict[str, float]:
        """Seconds of a step, of one without the constraint, and their ratio."""
        if self.seconds is None:
            return {}
        step, plain = self.seconds
        return {"seconds_per_step": step, "plain_seconds_per_step": plain, "time_ratio": step / plain}


def unlearn(
    model: MoEModel,
    objective: Objective,
    constraint: RouterConstraint,
    corpora: Corpora,
    training: Training,
    stop: StopRule,
    *,
    seed: int,
    scope: dict[int, list[int]] | None = None,
    replay: bool = False,
    critical_experts: int | None = None,
    corrected: Callable[[MoEModel], object] | None = None,
    state_file: Path,
    description: str = "unlearn",
) -> Outcome:
    """Unlearns in place until the stop rule is met, which is asked every `training.check_every` steps.

    Expert blocks train, or only the experts of `scope` by layer, and routers as the constraint lets them; everything
    else is fixed. With `replay` every training pass uses the original model's expert sets, with live weights. With
    `critical_experts` retain tokens weigh as `routing_aware_weights` says of so many experts per layer. With
    `corrected` (Method B, or the original routers) the check looks at corrected routers and the model ends corrected,
    while training goes on uncorrected. Resumes from `state_file`; on CPU the result is the same to the bit as without
    the interruption.

    Under torchrun every process calls this with the same arguments and a model of which `shard_experts` has made it a
    part: each trains on its rows of every batch and takes part in every check. Raises ValueError for what processes
    cannot share, for a corpus smaller than a batch, and for a state that other processes saved.
    """
    processes = distributed.processes()
    if scope and processes > 1:
        raise ConfigError(
            "`experts: top_attributed` trains one expert, which processes cannot share: start one process"
        )
    for kind, rows in (("forget", corpora.forget), ("retain", corpora.retain)):
        name, size = f"{kind}_batch_size", getattr(training, f"{kind}_batch_size")
        if size % processes:
            raise ConfigError(f"{name} {size} cannot be split over {processes} processes")
        if size > len(rows):
            raise ConfigError(f"{name} {size} exceeds the {len(rows)} documents of the {kind} corpus; lower it")
    in_linear_precision = linear_precision(model, training.linear_precision)
    model.model.eval()
    batches = _Batches(corpora, training, seed, model.model.device)
    used = batches.used("forget"), batches.used("retain")
    routers, experts = _trainable(model, scope, trained_layers(model, objective.last_layer, training.trained_layers))
    objective.start(model, *used)
    constraint.start(model, *used)
    original_sets = OriginalSets(model, [*used[0], *used[1]]) if replay else None
    weights = routing_aware_weights(model, *used, critical_experts) if critical_experts else None
    optimizer = _adamw(routers, experts, training)
    if training.gradient_checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    restricted = model.restrict_experts(scope, optimizer) if scope else nullcontext()
    progress = load_state(state_file, model.model, optimizer) or {"step": 0, "history": [], "constraint": {}}
    with restricted, ConstraintHandle(model, optimizer, constraint) as handle:
        steps = _Steps(
            model, objective, batches, training, seed, routers, experts, optimizer, in_linear_precision, original_sets,
            weights, handle,
        )  # fmt: skip
        handle.load_state_dict(progress["constraint"])
        step, history, measured = progress["step"], progress["history"], _Means()
        if step and distributed.is_first():
            print(f"{description} resumes at step {step}", file=sys.stderr, flush=True)
        bar = tqdm(total=training.max_steps, initial=step, desc=description, disable=not distributed.is_first())
        while True:
            if step % training.check_every == 0:
                if not math.isfinite(distributed.total_norm([p.detach() for p in routers + experts])):
                    status = "diverged"  # what answers nothing would pass for what has forgotten
                    break
                if not history or history[-1]["step"] < step:
                    if step:
                        handle.refit(batches.of("retain", step - 1))
                    with _temporarily(model, corrected):
                        history.append({"step": step, **distributed.agreed(stop.scores(model)), **measured.take()})
                bar.set_postfix({name: f"{history[-1][name]:.3f}" for name in stop.targets})
                if all(history[-1][name] <= target for name, target in stop.targets.items()):
                    status = "reached"
                    break
            if step >= training.max_steps:
                status = "not_reached"
                break
            if step % training.checkpoint_every == 0 and step > progress["step"]:
                save_state(
                    state_file, model.model, optimizer, step=step, history=history, constraint=handle.state_dict()
                )
            started = now()
            losses = steps.take(step)
            if losses is None:
                status = "diverged"
                break
            step += 1
            measured.add(**losses, seconds=now() - started, **constraint.observed())
            bar.update()
        bar.close()
        times = None if status == "diverged" else steps.seconds_by_turns()
    if training.gradient_checkpointing:
        model.model.gradient_checkpointing_disable()
    if corrected:
        corrected(model)
    model.model.eval().requires_grad_(True)
    return Outcome(status, step, history, times)


@dataclass(frozen=True)
class _Batches:
    """Both corpora as a run draws from them: batches are a function of seed and step alone."""

    corpora: Corpora
    training: Training
    seed: int
    device: torch.device

    def of(self, kind: str, step: int) -> Batch:
        """The rows of a step that this process has."""
        own = self._rows(kind, step)[distributed.rank() :: distributed.processes()]
        return collate(own, self.corpora.pad_id).to(self.device)

    def used(self, kind: str) -> list[Batch]:
        """All documents that some step draws, by length."""
        drawn = {row.id: row for step in range(self.training.max_steps) for row in self._rows(kind, step)}
        buckets = length_buckets(list(drawn.values()), TOKENS_PER_PASS)
        return [collate(bucket, self.corpora.pad_id).to(self.device) for bucket in buckets]

    def _rows(self, kind: str, step: int) -> list[Row]:
        return epoch_rows(getattr(self.corpora, kind), getattr(self.training, f"{kind}_batch_size"), self.seed, step)


@dataclass
class _Steps:
    """A step of training: gradients of both losses on its documents, under the constraint, then AdamW's update."""

    model: MoEModel
    objective: Objective
    batches: _Batches
    training: Training
    seed: int
    routers: list[nn.Parameter]
    experts: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    in_linear_precision: Callable[[], AbstractContextManager[None]]
    original_sets: OriginalSets | None
    weights: OriginalCache | None
    handle: ConstraintHandle

    def backward(self, step: int) -> dict[str, float] | None:
        """Computes the gradients of a step; returns its losses and how large the gradients are, or None if they are not
        finite or the retain loss is above its bound: the run has diverged."""
        torch.manual_seed(1_000_000 * self.seed + step)  # of dropout and stochastic rounding, wherever it is resumed
        self.model.model.train()
        self.optimizer.zero_grad()
        forget = self.batches.of("forget", step)
        with self._as_trained(forget):  # in the backward pass too, which may compute activations again
            with self._needed_layers("forget"), self.handle.forget():
                forget_loss = self.objective.forget_loss(self.model, forget)
            (forget_loss + self.handle.penalty()).backward()
        retain = self.batches.of("retain", step)
        if self.weights:
            retain.weights = self.weights.of(**retain.inputs)
        with self._as_trained(retain):
            with self._needed_layers("retain"), self.handle.retain():
                retain_loss = self.objective.retain_loss(self.model, retain)
            alpha = self.training.alpha_multiplier * self.objective.alpha
            (alpha * retain_loss + self.handle.penalty()).backward()
        losses = {"forget_loss": forget_loss.item(), "retain_loss": retain_loss.item(), **self.objective.monitor}
        losses = {name: distributed.average(loss) for name, loss in losses.items()}
        gradients = {"router_gradient": _rms_gradient(self.routers), "expert_gradient": _rms_gradient(self.experts)}
        if not all(map(math.isfinite, (losses["forget_loss"], *gradients.values()))):
            return None
        return {**losses, **gradients} if losses["retain_loss"] <= self.training.loss_bound else None

    def take(self, step: int) -> dict[str, float] | None:
        """Trains a step; returns what `backward` does, or None too where the handle raises Diverged."""
        try:
            losses = self.backward(step)
            if losses is not None:
                self.update()
            return losses
        except Diverged:
            return None

    def update(self) -> None:
        distributed.clip_gradients(self.routers + self.experts, self.training.clip_norm)
        self.optimizer.step()

    def seconds_by_turns(self) -> tuple[float, float] | None:
        """The shortest with the constraint, which needs routers that move, and without: what else the machine does only
        adds. None if a step diverged. Weights end as they were."""
        thetas, pairs = self.model.thetas(), []
        *others, of_routers = self.optimizer.param_groups
        with rate_zero(others):
            for _ in range(TIMED_PAIRS):
                constrained = self._seconds()
                with self.handle.lifted(), rate_zero([of_routers]):
                    pairs.append((constrained, self._seconds()))
        self.model.set_thetas(thetas)
        return None if any(None in pair for pair in pairs) else tuple(map(min, zip(*pairs, strict=True)))

    def _seconds(self) -> float | None:
        started = now()
        # None for a step that diverges: a rate of zero does not keep what is not finite out of the weights
        return None if self.take(step=0) is None else now() - started

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


def held_bytes(thing: object) -> int:
    """Bytes of the tensors that an object keeps in memory, in itself and in what it is made of; shared storage counts
    once."""
    storages: dict[int, int] = {}
    waiting, known = [thing], set()
    while waiting:
        item = waiting.pop()
        if id(item) in known:
            continue
        known.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif type(item).__module__.startswith("gripmoe.") and not isinstance(item, MoEModel):
            waiting += vars(item).values()
    return sum(storages.values())


def trained_layers(model: MoEModel, last_layer: int | None, count: int | None) -> list[int]:
    """The layers whose blocks train: all, or the last `count` up to `last_layer`, where the losses look last."""
    if count is None:
        return model.all_layers
    return [layer for layer in model.all_layers if last_layer is None or layer <= last_layer][-count:]


def _trainable(
    model: MoEModel, scope: dict[int, list[int]] | None, layers: Sequence[int]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Routers of `layers`, and the rest of their MoE blocks or the fused experts of the layers in `scope`; freezes all
    else."""
    model.model.requires_grad_(False)
    routers = [model.theta(layer) for layer in layers if layer in model.layers]
    if scope:
        experts = [p for layer in scope for p in model.expert_parameters(layer)]
    else:
        blocks = [p for layer in layers for p in model.block(layer).parameters()]
        experts = [p for p in blocks if all(p is not router for router in routers)]
    for parameter in routers + experts:
        parameter.requires_grad_(True)
    return routers, experts


def _adamw(routers: list[nn.Parameter], experts: list[nn.Parameter], training: Training) -> torch.optim.Optimizer:
    router_rate = training.learning_rate * training.router_multiplier
    groups = [
        {"params": alike, "lr": training.learning_rate, "weight_decay": training.weight_decay}
        for alike in distributed.by_sharding(experts)
    ]
    # Last: `seconds_by_turns` counts on it.
    groups.append({"params": routers, "lr": router_rate, "weight_decay": training.router_weight_decay})
    return make_adamw(training.optimizer, groups, betas=training.betas, eps=training.adam_epsilon)


@contextmanager
def _temporarily(model: MoEModel, corrected: Callable[[MoEModel], object] | None) -> Iterator[None]:
    thetas = model.thetas()
    if corrected:
        corrected(model)
    try:
        yield
    finally:
        model.set_thetas(thetas)


def _rms_gradient(parameters: list[nn.Parameter]) -> float:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    return distributed.total_norm(gradients).item() / math.sqrt(sum(g.numel() for g in gradients))


class _Means:
    """Running means of named numbers, taken and reset at each history row."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, **values: float) -> None:
        self._count += 1
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def take(self) -> dict[str, float]:
        means = {name: total / self._count for name, total in self._sums.items()}
        self.__init__()
        return means
