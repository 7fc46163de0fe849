"""What a world of published models leaves on disk, and what its training jobs hold there while they run."""

from __future__ import annotations

from pathlib import Path

from gripmoe.holdings import references_of
from gripmoe.memory import (
    BYTES_WEIGHT,
    GB,
    Step,
    bases_of,
    needed,
    sizes_of,
    tokens_of,
    traced_tokens,
    widths_of,
)
from gripmoe.project import Project


def disk_needed(project: Project, results: Path | None = None, at_once: int = 1) -> dict[str, float]:
    """GB by what takes them: weights of finished cells; the models that they start from; traces, bases and references,
    as recorded or at most; and the largest states of `at_once` training jobs, which each replaces a checkpoint by
    writing the next one beside it. Nothing for embedded models."""
    finished, recorded, states = 0.0, {}, []
    models = {name: sizes.total * BYTES_WEIGHT for name in project.models_needed if (sizes := sizes_of(project, name))}
    states = [
        state_bytes(project, Step(name, "finetune_model"))
        for name in models
        if project.models[name].source == "finetuned"
    ]
    for name, benchmark, objective, method, seed in project.cells():
        row, step = project.methods[method], Step(name, "unlearn", benchmark, objective, method)
        if name not in models or row.reference:
            continue
        finished += models[name]
        if not row.trains:
            continue
        states.append(state_bytes(project, step))
        sizes, widths = sizes_of(project, name), widths_of(project, name)
        traced = traced_tokens(project, step, results)
        of_token = 2 * widths.hidden + 4 * widths.experts + 2 * widths.chosen  # bf16, fp32, int16
        recorded["traces", name, benchmark] = 2 * sizes.layers * traced * of_token
        if row.has_bases:
            recorded["bases", name, benchmark, method] = bases_of(project, step, results)
        training = project.training(objective, method, benchmark)
        tokens = tokens_of(project, step, training, results)
        for kind, size in references_of(row, objective, sizes, widths, tokens).items():
            if size > project.world.reference_memory * GB:
                key = "references", name, benchmark, kind, seed
                recorded[key] = max(size, recorded.get(key, 0))
    kinds = {
        kind: sum(size for key, size in recorded.items() if key[0] == kind)
        for kind in ("traces", "bases", "references")
    }
    training = 2 * sum(sorted(states, reverse=True)[:at_once])
    found = {"finished cells": finished, "base models": sum(models.values()), **kinds, "training": training}
    return {name: size / GB for name, size in found.items() if size}


def state_bytes(project: Project, step: Step) -> float:
    """Of the weights and optimizer states that a training job saves to go on from, all its processes together."""
    processes = project.processes(step.model, step.method or None)
    weights = processes * sizes_of(project, step.model).held_by(processes) * BYTES_WEIGHT
    return weights + processes * needed(project, step).states * GB


def checkpoint_bytes(project: Project, step: Step) -> float:
    """Of all checkpoints that an "unlearn" step writes, one after the other, if it takes every step."""
    training = project.training(step.objective, step.method, step.benchmark)
    return (training.max_steps - 1) // training.checkpoint_every * state_bytes(project, step)


def checkpoints_written(project: Project) -> float:
    """TB that training of all cells of published models writes beside what stays, at most."""
    steps = (Step(cell[0], "unlearn", *cell[1:4]) for cell in project.cells() if project.methods[cell[3]].trains)
    return sum(checkpoint_bytes(project, step) for step in steps if sizes_of(project, step.model)) / 1e12
