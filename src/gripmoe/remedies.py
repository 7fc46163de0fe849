"""What would make a step of a published model fit, by the arithmetic that says that it does not."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path

from gripmoe.holdings import layers_trained, may_idle
from gripmoe.memory import Step, needed, sizes_of, widths_of
from gripmoe.project import Project

SIZES = ("trained_layers", "max_rank", "basis_memory", "evaluation_batch_size")  # what the GPUs hold grows with these
MOST_GPUS = 64  # that are suggested for one model


def what_would_fit(
    project: Project, step: Step, gpu_memory: float, host_memory: float, results: Path | None = None
) -> dict[str, list[str]]:
    """Where a step does not fit, "GPU" or "host", the changes each of which makes it fit there, by the same arithmetic.
    Where no change alone makes it fit its GPUs: more of them with a `max_rank` of an eighth of the hidden size or more.
    """

    def on_gpus(changed: Project) -> bool:
        return needed(changed, step, results).total <= gpu_memory

    def on_host(changed: Project) -> bool:
        return needed(changed, step, results).host <= host_memory

    def largest(key: str, fits: Callable[[Project], bool], within: Project = project) -> int:
        unit = project.training(step.objective, step.method, step.benchmark).check_every if key == "max_steps" else 1
        below = range(unit, settings.get(key, 1), unit)
        return unit * bisect_left(below, True, key=lambda value: not fits(_set(within, step, key, value)))

    settings, ways = _settings(project, step), {}
    if not on_gpus(project):
        more = next((text for text, changed in _more_gpus(project, step) if on_gpus(changed)), None)
        ways["GPU"] = [more] if more else []
        if (optimizer := _other_optimizer(project, step)) and on_gpus(optimizer):
            ways["GPU"].append("optimizer: adamw_8bit")
        if (idle := _idle_layers(project, step)) and on_gpus(idle):
            ways["GPU"].append("idle_layers: host")
        found = {key: largest(key, on_gpus) for key in SIZES}
        ways["GPU"] += [f"{key}: {value}" for key, value in found.items() if value]
        for text, changed in _more_gpus(project, step) if "max_rank" in settings and not ways["GPU"] else ():
            if (rank := largest("max_rank", on_gpus, changed)) >= settings["max_rank"] // 8:
                ways["GPU"] = [f"{text} with max_rank: {rank}"]
                break
    if not on_host(project):
        found = {key: largest(key, on_host) for key in ("max_steps", "basis_host_memory") if key in settings}
        more = next((text for text, changed in _more_nodes(project, step) if on_host(changed)), None)
        ways["host"] = [f"{key}: {value}" for key, value in found.items() if value] + ([more] if more else [])
    return ways


def _with_world(project: Project, **changes) -> Project:
    changed = copy.copy(project)
    changed.world = project.world.model_copy(update=changes)
    return changed


def _more_gpus(project: Project, step: Step) -> Iterator[tuple[str, Project]]:
    batch_sizes, nodes, idle = [], project.world.nodes.get(step.model, 1), ""
    if step.what == "finetune_model":
        batch_sizes = [project.models[step.model].batch_size]
    elif step.what == "unlearn" and project.methods[step.method].experts == "all":
        training = project.training(step.objective, step.method, step.benchmark)
        batch_sizes = [training.forget_batch_size, training.retain_batch_size]
        if training.idle_layers == "host" and step.objective == "rmu":
            idle = " without idle_layers"
    for count in range(project.gpus(step.model) + nodes, MOST_GPUS + 1, nodes):
        divisible = "" if not any(size % count for size in batch_sizes) else f" and batch sizes divisible by {count}"
        yield f"gpus: {count}{divisible}{idle}", _with_world(project, gpus={**project.world.gpus, step.model: count})


def _more_nodes(project: Project, step: Step) -> Iterator[tuple[str, Project]]:
    """Over which its GPUs can be spread, if several processes train."""
    gpus, nodes = project.gpus(step.model), project.world.nodes
    for count in range(nodes.get(step.model, 1) + 1, gpus + 1):
        if gpus % count == 0:
            yield f"nodes: {count}", _with_world(project, nodes={**nodes, step.model: count})


def _other_optimizer(project: Project, step: Step) -> Project | None:
    """With AdamW in 8 bits, if the step trains with another."""
    world = project.world
    if step.what == "unlearn":
        training = project.training(step.objective, step.method, step.benchmark)
        return None if training.optimizer == "adamw_8bit" else _set(project, step, "optimizer", "adamw_8bit")
    if step.what == "relearning" and world.relearning.optimizer != "adamw_8bit":
        return _with_world(project, relearning=world.relearning.model_copy(update={"optimizer": "adamw_8bit"}))
    if step.what == "finetune_model" and project.models[step.model].optimizer != "adamw_8bit":
        changed = copy.copy(project)
        model = project.models[step.model].model_copy(update={"optimizer": "adamw_8bit"})
        changed.models = {**project.models, step.model: model}
        return changed
    return None


def _idle_layers(project: Project, step: Step) -> Project | None:
    """With layers that no training pass runs in host memory, which helps where a single process trains."""
    if step.what == "unlearn" and may_idle(project.methods[step.method], step.objective):
        return _set(project, step, "idle_layers", "host")
    return None


def _settings(project: Project, step: Step) -> dict[str, int]:
    """Numbers that the memory of a step grows with, as they are."""
    if step.what in ("evaluate", "forcing"):
        return {"evaluation_batch_size": project.benchmarks[step.benchmark].evaluation_batch_size}
    if step.what != "unlearn":
        return {}
    training, method = project.training(step.objective, step.method, step.benchmark), project.methods[step.method]
    settings = {"max_steps": training.max_steps}
    if method.experts == "all":
        settings["trained_layers"] = layers_trained(method, step.objective, training, sizes_of(project, step.model))
    if method.has_bases:
        settings["max_rank"] = method.max_rank or widths_of(project, step.model).hidden
        settings["basis_memory"] = project.world.basis_memory
        settings["basis_host_memory"] = project.world.basis_host_memory
    return settings


def _set(project: Project, step: Step, key: str, value: object) -> Project:
    """A project in which a step's method, training or benchmark, or the world, has one other setting."""
    if key == "evaluation_batch_size":
        changed = copy.copy(project)
        benchmark = project.benchmarks[step.benchmark].model_copy(update={key: value})
        changed.benchmarks = {**project.benchmarks, step.benchmark: benchmark}
        return changed
    if key in ("basis_memory", "basis_host_memory"):
        return _with_world(project, **{key: value})
    if key == "max_rank":
        changed = copy.copy(project)
        method = project.methods[step.method].model_copy(update={key: value})
        changed.methods = {**project.methods, step.method: method}
        return changed
    cell, overrides = f"{step.objective}/{step.method}", project.world.overrides
    return _with_world(project, overrides={**overrides, cell: {**overrides.get(cell, {}), key: value}})
