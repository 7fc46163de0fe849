"""The unlearning loop: objective, router constraint, stop rule, resume (Sec. 4, App. A)."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from gripmoe.config.methods import EpsNullConfig
from gripmoe.config.training import Training
from gripmoe.constraints.base import RouterConstraint
from gripmoe.constraints.baselines import restricted_experts
from gripmoe.constraints.build import held_bytes
from gripmoe.constraints.expert_null_space import ExpertNullSpace
from gripmoe.constraints.hooks import ConstraintHandle
from gripmoe.constraints.original import OriginalSets
from gripmoe.data.corpora import Corpora
from gripmoe.evaluation.stop_rule import StopRule
from gripmoe.io import distributed
from gripmoe.io.clock import now
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.fp8 import linear_precision
from gripmoe.moe.modes import checkpointing, restored, train_only
from gripmoe.training.adversary import RelearningAdversary
from gripmoe.training.averaging import WeightAverage
from gripmoe.training.checkpoint import load_state, save_state
from gripmoe.training.forget_gradient import forget_gradient_edits
from gripmoe.training.objectives import Objective
from gripmoe.training.optimizers import make_adamw
from gripmoe.training.step_batches import StepBatches
from gripmoe.training.steps import Steps


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "reached" the forget target, "not_reached" within the steps, or "diverged"; and its history.

    A history row has the step, the dev scores there and, after the first, means since the row before: losses,
    root-mean-square gradient per element of routers and experts, and seconds per step. `seconds` are those of a step
    under the constraint and of one without it, taken in turns at the end; None if the run, or a timed step, diverged.
    """

    status: str
    steps: int
    history: list[dict[str, float]]
    seconds: tuple[float, float] | None
    documents: dict[str, int]  # of a step, over all processes and passes: "forget" and "retain"
    tokens: int  # that training passed forward and backward through the model, the adversary's too, in all processes
    held_bytes: int  # of the tensors that the constraints of routers and experts keep

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
    expert_eps: EpsNullConfig | None = None,
    correct: Callable[[MoEModel], object] | None = None,
    state_file: Path,
    description: str = "unlearn",
) -> Outcome:
    """Unlearns in place until the stop rule is met, which is asked every `training.check_every` steps.

    Expert blocks train, or only the experts of `scope` by layer, and routers as the constraint lets them; everything
    else is frozen. With `replay` training passes use the original model's expert sets, with live weights. With
    `expert_eps` experts move outside the span of their retain inputs (`ExpertNullSpace`). With `correct` (Method B,
    or the original routers) the check looks at corrected routers and the model ends corrected, while training goes on
    uncorrected. With `training.average_decay` the same holds of averaged weights (`WeightAverage`). Resumes from
    `state_file`; on CPU the result is the same to the bit as without the interruption.

    Under torchrun every process calls this with the same arguments and its part of a model of `shard_experts`, trains
    on its rows of every batch and takes part in every check. Batch sizes are of each process and pass; the effective
    ones are printed. Raises ConfigError for what processes cannot share, for a corpus smaller than a batch, for a state
    of another number of processes, for SAM or `expert_eps` in lower precision than fp32, and for averaged weights if
    the constraint projects at every n-th step only.
    """
    batches = StepBatches(corpora, training, seed, model.model.device)
    batches.check(scope)
    if distributed.is_first():
        print(f"{description}: {batches}", file=sys.stderr, flush=True)
    in_linear_precision = linear_precision(model, training.linear_precision)
    model.model.eval()
    forget, retain = batches.used("forget"), batches.used("retain")
    count = training.trained_layers
    layers = layers_of_losses(model, objective.last_layer, count) if count else model.all_layers
    routers, experts = _trainable_parameters(model, scope, layers)
    if training.sharpness_radius and any(parameter.dtype != torch.float32 for parameter in experts):
        raise ConfigError(
            "`sharpness_radius` needs weights in fp32: in lower precision the move up the loss is rounded away"
        )
    if training.average_decay and constraint.every > 1:
        raise ConfigError("`average_decay` needs `every: 1`: between two projections, routers leave the constraint")
    forget_edits = forget_gradient_edits(experts, training)  # before a state is loaded: they know the original weights
    objective.start(model, forget, retain)
    constraint.start(model, retain)
    original_sets = OriginalSets(model, [*forget, *retain]) if replay else None
    expert_null_space = ExpertNullSpace(model, retain, expert_eps) if expert_eps else None
    if expert_null_space:
        expert_null_space.freeze_others(experts)
    optimizer = _adamw(routers, experts, training)
    adversary = None
    if training.adversary_steps:
        adversary = RelearningAdversary(experts, training.adversary_rate * training.learning_rate)
    average = WeightAverage(routers + experts, training.average_decay) if training.average_decay else None
    restricted = restricted_experts(model, scope, optimizer) if scope else nullcontext()
    progress = load_state(state_file, model.model, optimizer) or {
        "step": 0,
        "history": [],
        "constraint": {},
        "tokens": 0,
    }
    recomputed = checkpointing(model.model, training.gradient_checkpointing)
    with (
        recomputed,
        restricted,
        model.unpadded(),
        ConstraintHandle(model, optimizer, constraint, training.loss_bound) as handle,
    ):
        steps = Steps(
            model=model,
            objective=objective,
            batches=batches,
            training=training,
            routers=routers,
            experts=experts,
            optimizer=optimizer,
            in_linear_precision=in_linear_precision,
            original_sets=original_sets,
            adversary=adversary,
            forget_edits=forget_edits,
            expert_null_space=expert_null_space,
            average=average,
            handle=handle,
            tokens=progress["tokens"],
        )
        if progress["constraint"]:
            handle.load_state_dict(progress["constraint"])
        if average and "averages" in progress:
            average.load_state(progress["averages"])
        status, step, history = _until_met(steps, stop, progress, correct, state_file, description)
        if status == "diverged" and distributed.is_first():
            what = "a loss, a gradient or a weight is not finite, or the retain loss is above `loss_bound`"
            print(f"{description} diverged at step {step}: {what}", file=sys.stderr, flush=True)
        tokens = round(distributed.average(steps.tokens) * distributed.processes())
        steps.average = None  # the steps below are only timed
        times = None if status == "diverged" else steps.seconds_by_turns()
        if average and status != "diverged":
            # After the timed steps: in them AdamWFp32 would add the rounding errors that it keeps of earlier weights.
            average.write()
    if correct:
        with model.unpadded():  # as in the checks
            correct(model)
    model.model.eval().requires_grad_(True)
    sizes = {kind: batches.size(kind) for kind in ("forget", "retain")}
    kept = held_bytes(constraint) + (expert_null_space.nbytes if expert_null_space else 0)
    return Outcome(status, step, history, times, sizes, tokens, kept)


def _until_met(
    steps: Steps,
    stop: StopRule,
    progress: dict[str, Any],
    correct: Callable[[MoEModel], object] | None,
    state_file: Path,
    description: str,
) -> tuple[str, int, list[dict[str, float]]]:
    """Trains until the stop rule is met, the steps are taken or the run diverges. Returns the status, the number of
    steps and the history."""
    model, training, handle = steps.model, steps.training, steps.handle
    step, history, sums, counts = progress["step"], progress["history"], Counter(), Counter()
    if step and distributed.is_first():
        print(f"{description} resumes at step {step}", file=sys.stderr, flush=True)
    with tqdm(total=training.max_steps, initial=step, desc=description, disable=not distributed.is_first()) as bar:
        while True:
            if step % training.check_every == 0:
                if not math.isfinite(distributed.total_norm([p.detach() for p in steps.routers + steps.experts])):
                    # A model that answers nothing would pass for one that has forgotten.
                    return "diverged", step, history
                handle.settle()  # a run is saved and ends after a check
                if not history or history[-1]["step"] < step:
                    with steps.average.weights() if steps.average else nullcontext(), _corrected(model, correct):
                        scores = distributed.agreed(stop.scores(model))
                    means = {name: total / counts[name] for name, total in sums.items()}
                    history.append({"step": step, **scores, **means})
                    sums.clear()
                    counts.clear()
                bar.set_postfix({name: f"{history[-1][name]:.3f}" for name in stop.targets})
                if stop.met(history, training.checks_to_stop):
                    return "reached", step, history
            if step >= training.max_steps:
                return "not_reached", step, history
            saves = training.checkpoint_every and step % training.checkpoint_every == 0
            if saves and step > progress["step"]:
                kept = dict(step=step, history=history, constraint=handle.state_dict(), tokens=steps.tokens)
                kept |= {"averages": steps.average.state()} if steps.average else {}
                save_state(state_file, model.model, steps.optimizer, **kept)
            started = now()
            losses = steps.take(step)
            if losses is None:
                return "diverged", step, history
            step += 1
            observed = {name: float(number) for name, number in handle.constraint.observed().items()}
            if taken := observed.keys() & {*losses, "seconds", *history[0]}:
                raise ConfigError(f"`observed` of the constraint has {min(taken)!r}, which the history has: rename it")
            seen = {**losses, "seconds": now() - started, **observed}
            sums.update(seen)
            counts.update(seen.keys())  # a constraint may observe nothing in its first steps
            bar.update()


def layers_of_losses(model: MoEModel, last_layer: int | None, count: int | None) -> list[int]:
    """The layers up to `last_layer`, the last that the losses look at; or the last `count` of them, which train. Raises
    ConfigError if there are fewer."""
    layers = [layer for layer in model.all_layers if last_layer is None or layer <= last_layer]
    if count is not None and count > len(layers):
        raise ConfigError(f"`trained_layers` is {count}, and the losses look at {len(layers)} MoE layers: lower it")
    return layers if count is None else layers[-count:]


def _trainable_parameters(
    model: MoEModel, scope: dict[int, list[int]] | None, layers: Sequence[int]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Routers of `layers` with their biases, and the rest of their MoE blocks or the fused experts of the layers in
    `scope`; freezes all other parameters."""
    routers = [p for layer in layers for p in model.router_parameters(layer)]
    if scope:
        experts = [p for layer in scope for p in model.expert_parameters(layer)]
    else:
        experts = [p for layer in layers for p in model.other_parameters(layer)]
    train_only(model.model, routers + experts)
    return routers, experts


def _adamw(routers: list[nn.Parameter], experts: list[nn.Parameter], training: Training) -> torch.optim.Optimizer:
    router_rate = training.learning_rate * training.router_multiplier
    groups = [
        {"params": alike, "lr": training.learning_rate, "weight_decay": training.weight_decay}
        for alike in distributed.by_sharding(experts)
    ]
    # The group of routers is last: `Steps.seconds_by_turns` takes it by position.
    groups.append({"params": routers, "lr": router_rate, "weight_decay": training.router_weight_decay})
    return make_adamw(training.optimizer, groups, betas=training.betas, eps=training.adam_epsilon)


@contextmanager
def _corrected(model: MoEModel, correct: Callable[[MoEModel], object] | None) -> Iterator[None]:
    if correct is None:
        yield
        return
    with restored(model.router_parameters()):
        correct(model)
        yield
