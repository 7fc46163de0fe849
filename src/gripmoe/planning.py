"""What a world still has to compute, and what that costs: before anything is submitted.

Seconds come from the benchmarks that earlier jobs recorded; where there are none, from arithmetic on the model's size.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gripmoe.catalogue import PublishedModel
from gripmoe.memory import BYTES_WEIGHT, Step, layers_run, needed
from gripmoe.project import Project

FLOPS = 1.0e14  # of one GPU in eager MoE code, a tenth of what an H100 or H200 can do in bf16
TINY_MEMORY = 1.0  # GB that a step with an embedded model takes of the machine's memory
TINY_SECONDS = {
    "prepare_model": 480,
    "finetune_model": 120,
    "unlearn": 55,
    "realign": 5,
    "evaluate": 20,
    "attack": 45,
}  # two laptop cores
QUESTIONS, QUESTION_TOKENS = 16_000, 150  # WMDP-Cyber and MMLU
ATTACK_PASSES = 3.0  # what all attacks ask, as a multiple of one evaluation


@dataclass(frozen=True)
class Job:
    """One job that has not run: its rule, its cell, how many hours it takes (of each of its GPUs, added up), whether
    that was recorded, its GPUs, and GB that it needs on each of them, or without a GPU in the machine."""

    rule: str
    cell: str
    hours: float
    recorded: bool
    gpus: int
    memory: float | None  # of a published model whose sizes are not given, unknown


def jobs_left(project: Project, results: Path) -> list[Job]:
    """Training, correction, evaluation and attack of every cell of the world, and base models, whose output is not
    there. What is there but out of date only Snakemake knows (`snakemake -n`)."""
    left = []

    def add(rule: str, cell: tuple, output: Path) -> None:
        if not output.exists():
            left.append(_job(project, results, rule, cell))

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


def _job(project: Project, results: Path, rule: str, cell: tuple) -> Job:
    """With hours, and memory of an embedded model, as recorded; else as estimated."""
    recorded, need = _benchmarks(results, rule, cell), needed(project, Step(cell[0], rule, *cell[1:4]), results)
    memory = need and need.total
    training = rule in ("unlearn", "finetune_model")
    processes = project.processes(cell[0], cell[3] if len(cell) > 1 else None) if training else 1
    held = max(need.gpus, 1) if need else processes
    if recorded:
        hours = held * sum(float(row["s"]) for row in recorded) / len(recorded) / 3600
    else:  # GPUs that share the layers work one after the other
        hours = held / processes * _estimated_hours(project, rule, cell)
    if project.trained_from(cell[0]).source == "embedded":
        peaks = [float(row["max_rss"]) / 1e3 for row in recorded if row.get("max_rss", "-") not in ("-", "NA")]
        memory = max(peaks, default=TINY_MEMORY)
    return Job(rule, ".".join(map(str, cell)), hours, bool(recorded), need.gpus if need else 0, memory)


def _benchmarks(results: Path, rule: str, cell: tuple) -> list[dict[str, str]]:
    """What Snakemake recorded of the same cell with another seed, else of the same rule and model."""
    folder = results / "benchmarks" / rule
    name = ".".join(map(str, cell[:-1])) if len(cell) > 1 else cell[0]
    for pattern in (f"{name}.*.tsv", f"{cell[0]}.*.tsv", f"{cell[0]}.tsv"):
        if files := list(folder.glob(pattern)):
            return [next(csv.DictReader(file.read_text().splitlines(), delimiter="\t")) for file in files]
    return []


def _estimated_hours(project: Project, rule: str, cell: tuple) -> float:
    model = project.trained_from(cell[0])
    if not isinstance(model, PublishedModel):
        return TINY_SECONDS[rule] / 3600
    if not model.parameters or rule in ("prepare_model", "finetune_model"):
        return 0.5
    benchmark = project.benchmarks[cell[1]]
    evaluation = QUESTIONS * QUESTION_TOKENS * 2 * model.parameters.active
    flops = {"evaluate": evaluation, "attack": ATTACK_PASSES * evaluation, "realign": evaluation / 10}
    if rule == "unlearn":
        training = project.training(cell[2], cell[3], cell[1])
        tokens = (training.forget_batch_size + training.retain_batch_size) * benchmark.max_length
        share = layers_run(cell[2], training, model.parameters) / model.parameters.layers
        return training.max_steps * tokens * 6 * model.parameters.active * share / FLOPS / 3600
    return flops[rule] / FLOPS / 3600


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
