"""The unlearning loop: objective, router constraint, stop at matched forgetting, resume (Sec. 4, App. A)."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from gripmoe import distributed
from gripmoe.calibration import routing_aware_weights
from gripmoe.checkpoint import load_state, save_state
from gripmoe.clock import now
from gripmoe.config import Training
from gripmoe.constraints import RouterConstraint
from gripmoe.data.documents import Batch, Row, collate, length_buckets
from gripmoe.guard import RouterGuard
from gripmoe.moe import MoEModel
from gripmoe.moe.fp8 import expert_precision, linear_precision
from gripmoe.objectives import Objective
from gripmoe.optimizer import make_adamw, rate_zero
from gripmoe.reference import OriginalSets

TOKENS_PER_PASS = 4000  # padded, where nothing is trained
TIMED_PAIRS = 8


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "reached" the forget target, "not_reached" within the steps, or "diverged"; and its history.

    A history row has the step, the dev scores there and, after the first, means since the row before: losses,
    root-mean-square gradient per element of routers and experts, and seconds per step. `seconds` are those of a step
    under the constraint and of one without it, taken in turns at the end; None where the run diverged.
    """

    status: str
    steps: int
    history: list[dict[str, float]]
    seconds: tuple[float, float] | None


def epoch_rows(rows: Sequence[Row], batch_size: int, seed: int, step: int) -> list[Row]:
    """The rows of one step: a new shuffle every epoch, a function of seed and step alone, so that a resumed run sees
    the same data. Raises ValueError if the corpus is smaller than a batch."""
    if batch_size > len(rows):
        raise ValueError(f"batch size {batch_size} exceeds the {len(rows)} documents of the corpus")
    per_epoch = len(rows) // batch_size
    order = list(range(len(rows)))
    random.Random(f"epoch {seed} {step // per_epoch}").shuffle(order)
    start = step % per_epoch * batch_size
    return [rows[i] for i in order[start : start + batch_size]]


def unlearn(
    model: MoEModel,
    objective: Objective,
    constraint: RouterConstraint,
    forget: Sequence[Row],
    retain: Sequence[Row],
    training: Training,
    *,
    seed: int,
    pad_id: int,
    targets: Mapping[str, float],
    scores: Callable[[MoEModel], dict[str, float]],
    scope: dict[int, list[int]] | None = None,
    replay: bool = False,
    critical_experts: int | None = None,
    corrected: Callable[[MoEModel], object] | None = None,
    state_file: Path,
    description: str = "unlearn",
) -> Outcome:
    """Unlearns in place until every score that has a target is at most that; `scores(model)` is asked every
    `training.check_every` steps.

    Expert blocks train, or only the experts of `scope` by layer, and routers as the constraint lets them; everything
    else is fixed. With `replay` every training pass uses the original model's expert sets, with live weights. With
    `critical_experts` retain tokens weigh as `routing_aware_weights` says of so many experts per layer. With
    `corrected` (Method B, or the original routers) the check looks at corrected routers and the model ends corrected,
    while training goes on uncorrected. Resumes from `state_file`; on CPU the result is the same to the bit as without
    the interruption.

    Under torchrun every process calls this with the same arguments and a model of which `shard_experts` has made it a
    part: each trains on its rows of every batch and takes part in every check.
    """
    device = model.model.device
    processes = distributed.processes()
    if scope and processes > 1:
        raise ValueError("a method that trains one expert needs one process: there is nothing to share")
    for name in ("forget_batch_size", "retain_batch_size"):
        if getattr(training, name) % processes:
            raise ValueError(f"{name} {getattr(training, name)} cannot be split over {processes} processes")
    in_linear_precision = linear_precision(model, training.linear_precision)

    def batch(rows: Sequence[Row], size: int, step: int) -> Batch:
        own = epoch_rows(rows, size, seed, step)[distributed.rank() :: processes]
        return collate(own, pad_id).to(device)

    def used(rows: Sequence[Row], size: int) -> list[Batch]:
        drawn = {row.id: row for n in range(training.max_steps) for row in epoch_rows(rows, size, seed, n)}
        return [collate(bucket, pad_id).to(device) for bucket in length_buckets(list(drawn.values()), TOKENS_PER_PASS)]

    model.model.eval()
    documents = used(forget, training.forget_batch_size), used(retain, training.retain_batch_size)
    routers, experts = _trainable(model, scope, trained_layers(model, objective.last_layer, training.trained_layers))
    objective.start(model, *documents)
    constraint.start(model, *documents)
    original_sets = OriginalSets(model, [*documents[0], *documents[1]]) if replay else None
    weights = routing_aware_weights(model, *documents, critical_experts) if critical_experts else None
    optimizer = _adamw(routers, experts, training)
    if training.gradient_checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    measured = _Means()

    @contextmanager
    def as_trained(batch: Batch) -> Iterator[None]:
        with ExitStack() as entered:
            entered.enter_context(expert_precision(model, training.expert_precision))
            entered.enter_context(in_linear_precision())
            if original_sets and not guard.is_lifted:
                entered.enter_context(model.force_routing(original_sets.of(**batch.inputs)))
            yield

    def needed_layers(kind: str):
        if objective.last_layer is None or kind in guard.watches:
            return nullcontext()
        return model.only_layers(objective.last_layer + 1)

    def backward(step: int) -> dict[str, float]:
        """Gradients of both losses on the documents of a step; returns the losses."""
        model.model.train()
        optimizer.zero_grad()
        forget_batch = batch(forget, training.forget_batch_size, step)
        with as_trained(forget_batch):  # in the backward pass too, which may compute activations again
            with needed_layers("forget"), guard.forget():
                forget_loss = objective.forget_loss(model, forget_batch)
            (forget_loss + guard.penalty()).backward()
        retain_batch = batch(retain, training.retain_batch_size, step)
        if weights:
            retain_batch.weights = weights.of(**retain_batch.inputs)
        with as_trained(retain_batch):
            with needed_layers("retain"), guard.retain():
                retain_loss = objective.retain_loss(model, retain_batch)
            (training.alpha_multiplier * objective.alpha * retain_loss + guard.penalty()).backward()
        losses = {"forget_loss": forget_loss.item(), "retain_loss": retain_loss.item(), **objective.monitor}
        return {name: distributed.average(loss) for name, loss in losses.items()}

    def update(step: int) -> None:
        distributed.clip_gradients(routers + experts, training.clip_norm)
        torch.manual_seed(1_000_000 * seed + step)  # of stochastic rounding, the same wherever it is resumed
        optimizer.step()

    def seconds() -> float:
        started = now()
        backward(step=0)
        update(step=0)
        return now() - started

    def seconds_by_turns() -> tuple[float, float]:
        """The shortest with the constraint, which needs routers that move, and without: what else the machine does only
        adds. Weights end as they were."""
        thetas, pairs = model.thetas(), []
        *others, of_routers = optimizer.param_groups
        with rate_zero(others):
            for _ in range(TIMED_PAIRS):
                constrained = seconds()
                with guard.lifted(), rate_zero([of_routers]):
                    pairs.append((constrained, seconds()))
        model.set_thetas(thetas)
        return tuple(map(min, zip(*pairs, strict=True)))

    restricted = model.restrict_experts(scope, optimizer) if scope else nullcontext()
    progress = load_state(state_file, model.model, optimizer) or {"step": 0, "history": [], "constraint": {}}
    with restricted, RouterGuard(model, optimizer, constraint) as guard:
        guard.load_state_dict(progress["constraint"])
        step, history = progress["step"], progress["history"]
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
                        guard.refit(batch(retain, training.retain_batch_size, step - 1))
                    with _temporarily(model, corrected):
                        history.append({"step": step, **distributed.agreed(scores(model)), **measured.take()})
                bar.set_postfix({name: f"{history[-1][name]:.3f}" for name in targets})
                if all(history[-1][name] <= target for name, target in targets.items()):
                    status = "reached"
                    break
            if step >= training.max_steps:
                status = "not_reached"
                break
            if step % training.checkpoint_every == 0 and step > progress["step"]:
                save_state(
                    state_file, model.model, optimizer, step=step, history=history, constraint=guard.state_dict()
                )
            started = now()
            losses = backward(step)
            if not math.isfinite(losses["forget_loss"]) or not losses["retain_loss"] <= training.loss_bound:
                status = "diverged"
                break
            gradients = {"router_gradient": _rms_gradient(routers), "expert_gradient": _rms_gradient(experts)}
            if not all(map(math.isfinite, gradients.values())):
                status = "diverged"
                break
            update(step)
            step += 1
            measured.add(**losses, **gradients, seconds=now() - started, **constraint.observed())
            bar.update()
        bar.close()
        times = None if status == "diverged" else seconds_by_turns()
    if training.gradient_checkpointing:
        model.model.gradient_checkpointing_disable()
    if corrected:
        corrected(model)
    model.model.eval().requires_grad_(True)
    return Outcome(status, step, history, times)


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
