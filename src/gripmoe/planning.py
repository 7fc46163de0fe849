"""What a world still has to compute, what that costs, and whether it fits: before anything is submitted.

Seconds come from the benchmarks that earlier jobs recorded; where there are none, from arithmetic on the model's size.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gripmoe.config import PublishedModel, Sizes, Training
from gripmoe.project import Project

FLOPS = 1.0e14  # of one GPU in eager MoE code, a tenth of what an H100 or H200 can do in bf16
TINY_SECONDS = {
    "prepare_model": 480,
    "finetune_model": 120,
    "unlearn": 55,
    "realign": 5,
    "evaluate": 20,
    "attack": 45,
}  # two laptop cores
BYTES_WEIGHT, BYTES_GRADIENT = 2, 2  # bf16
BYTES_STATES = {"adamw": 4, "adamw_8bit": 2}  # two states in the dtype of the parameter, or in 8 bits
QUESTIONS, QUESTION_TOKENS = 16_000, 150  # WMDP-Cyber and MMLU
ATTACK_PASSES = 3.0  # what all attacks ask, as a multiple of one evaluation


@dataclass(frozen=True)
class Job:
    """One job that has not run: its rule, its cell, and how long it will take."""

    rule: str
    cell: str
    hours: float
    recorded: bool


def jobs_left(project: Project, results: Path) -> list[Job]:
    """Training, correction, evaluation and attack of every cell of the world, and base models, whose output is not
    there. What is there but out of date only Snakemake knows (`snakemake -n`)."""
    left = []

    def add(rule: str, cell: tuple, output: Path) -> None:
        if not output.exists():
            hours, recorded = _hours(project, results, rule, cell)
            if recorded and rule in ("unlearn", "finetune_model"):
                hours *= project.processes(cell[0], cell[3] if len(cell) > 1 else None)  # hours of each of its GPUs
            left.append(Job(rule, ".".join(map(str, cell)), hours, recorded))

    for name in dict.fromkeys([*project.world.models, *_oracles(project), *_bases(project)]):
        rule = "finetune_model" if project.models[name].source == "finetuned" else "prepare_model"
        add(rule, (name,), results / "models" / name / "model.json")
    for cell in project.cells():
        folder = results.joinpath(*map(str, cell))
        method = project.methods[cell[3]]
        if not method.reference:
            add("unlearn" if method.trains else "realign", cell, folder / "checkpoint.json")
        add("evaluate", cell, folder / "evaluation.json")
        add("attack", cell, folder / "attack.json")
    return left


def _oracles(project: Project) -> list[str]:
    return [m.oracle for m in (project.models[name] for name in project.world.models) if m.oracle]


def _bases(project: Project) -> list[str]:
    return [m.base for m in (project.models[name] for name in project.world.models) if m.source == "finetuned"]


def _hours(project: Project, results: Path, rule: str, cell: tuple) -> tuple[float, bool]:
    """Hours of a job: recorded of the same cell with another seed, else of the same rule and model, else estimated."""
    folder = results / "benchmarks" / rule
    name = ".".join(map(str, cell[:-1])) if len(cell) > 1 else cell[0]
    for pattern in (f"{name}.*.tsv", f"{cell[0]}.*.tsv", f"{cell[0]}.tsv"):
        seconds = [_recorded_seconds(file) for file in folder.glob(pattern)]
        if seconds:
            return sum(seconds) / len(seconds) / 3600, True
    model = project.trained_from(cell[0])
    if not isinstance(model, PublishedModel):
        return TINY_SECONDS[rule] / 3600, False
    if not model.parameters or rule in ("prepare_model", "finetune_model"):
        return 0.5, False
    benchmark = project.benchmarks[cell[1]]
    evaluation = QUESTIONS * QUESTION_TOKENS * 2 * model.parameters.active
    flops = {"evaluate": evaluation, "attack": ATTACK_PASSES * evaluation, "realign": evaluation / 10}
    if rule == "unlearn":
        training = project.training(cell[2], cell[3], cell[1])
        tokens = (training.forget_batch_size + training.retain_batch_size) * benchmark.max_length
        share = _trained_layers(cell[2], training, model.parameters) / model.parameters.layers
        return training.max_steps * tokens * 6 * model.parameters.active * share / FLOPS / 3600, False
    return flops[rule] / FLOPS / 3600, False


def _trained_layers(objective: str, training: Training, sizes: Sizes) -> int:
    """RMU neither trains nor runs what comes after its layer, unless a constraint looks there."""
    return training.objective["layer"] + 1 if objective == "rmu" else sizes.layers


def _recorded_seconds(file: Path) -> float:
    with file.open(newline="") as lines:
        return float(next(csv.DictReader(lines, delimiter="\t"))["s"])


@dataclass(frozen=True)
class Memory:
    """GB that a step needs at least on each of its GPUs (activations come on top), with the arithmetic."""

    model: str
    objective: str  # or what else is done with the model
    gpus: int
    weights: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.states


def memory_needed(project: Project) -> list[Memory]:
    """Of every published model: its weights and the original's where it is evaluated and attacked; under an objective
    gradients and AdamW states of the MoE blocks that train (RMU: those up to its layer), all of these divided by the
    processes that share the model. Finetuning on news, in as many processes, and relearning, in one, train everything.
    Embedded models need next to nothing."""
    needs = []
    for name in project.world.models:
        model = project.trained_from(name)
        if not isinstance(model, PublishedModel) or not model.parameters:
            continue
        sizes, gpus = model.parameters, project.world.processes.get(name, 1)
        needs.append(Memory(name, "evaluation", 1, 2 * sizes.total * BYTES_WEIGHT / 1e9, 0.0, 0.0))
        finetuned = project.models[name] if project.models[name].source == "finetuned" else None
        for what, whole in (("finetuning", finetuned), ("relearning", project.world.relearning)):
            if whole:
                each = BYTES_WEIGHT, BYTES_GRADIENT, BYTES_STATES[whole.optimizer]
                together = gpus if what == "finetuning" else 1
                needs.append(Memory(name, what, together, *(sizes.held_by(together) * part / 1e9 for part in each)))
        benchmark = next(b for b in project.world.benchmarks if project.fits(name, b))
        for objective in project.world.objectives:
            training = project.training(objective, "unconstrained", benchmark)
            trained = sizes.blocks * _trained_layers(objective, training, sizes) / sizes.layers / gpus
            states = trained * BYTES_STATES[training.optimizer]
            parts = sizes.held_by(gpus) * BYTES_WEIGHT, trained * BYTES_GRADIENT, states
            needs.append(Memory(name, objective, gpus, *(part / 1e9 for part in parts)))
    return needs


def disk_needed(project: Project) -> float:
    """GB of the weights that finished cells of published models keep."""
    cells = [project.trained_from(cell[0]) for cell in project.cells() if not project.methods[cell[3]].reference]
    return sum(m.parameters.total * BYTES_WEIGHT / 1e9 for m in cells if isinstance(m, PublishedModel) and m.parameters)


def check_budget(jobs: Sequence[Job], budget: float | None) -> None:
    """Raises ValueError, with the most expensive jobs, if all take more hours than `budget`."""
    total = sum(job.hours for job in jobs)
    if budget is not None and total > budget:
        worst = sorted(jobs, key=lambda job: -job.hours)[:5]
        listed = "; ".join(f"{job.rule} {job.cell} {job.hours:.2f} h" for job in worst)
        raise ValueError(f"{total:.1f} hours exceed the budget of {budget:g}. Most expensive: {listed}")
