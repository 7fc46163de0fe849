"""What a world still has to compute, and what that costs: before anything is submitted.

Seconds come from the benchmarks that earlier jobs recorded; where there are none, from arithmetic on the model's size.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gripmoe.catalogue import PublishedModel
from gripmoe.errors import ConfigError
from gripmoe.hours import hours_needed
from gripmoe.memory import Step, needed, sizes_of
from gripmoe.project import Project

TINY_MEMORY = 1.0  # GB that a step with an embedded model takes of the machine's memory
TINY_SECONDS = {
    "prepare_model": 480,
    "finetune_model": 120,
    "trace_routing": 7,
    "fit_basis": 9,
    "unlearn": 55,
    "realign": 5,
    "evaluate": 20,
    "attack": 45,
}  # two laptop cores
UNKNOWN_HOURS = 0.5  # of what is fetched and written, and of a published model whose sizes are not given


@dataclass(frozen=True)
class Job:
    """One job that has not run: its rule, its cell, how many hours it takes (of each of its GPUs, added up, or without
    one of the machine), whether that was recorded, its GPUs, and GB that it needs on each of them, or in the machine.
    """

    rule: str
    cell: str
    hours: float
    recorded: bool
    gpus: int
    memory: float | None  # of a published model whose sizes are not given, unknown


def jobs_left(project: Project, results: Path) -> list[Job]:
    """Of every cell of the world training, correction, evaluation and attack, with the traces and bases that they need,
    and base models, whose output is not there. What is there but out of date only Snakemake knows (`snakemake -n`)."""
    left = {}

    def add(rule: str, cell: tuple, output: Path) -> None:
        if (rule, cell) not in left and not output.exists():
            left[rule, cell] = _job(project, results, rule, cell)

    for name in project.models_needed:
        rule = "finetune_model" if project.models[name].source == "finetuned" else "prepare_model"
        add(rule, (name,), results / "models" / name / "model.json")
    for cell in project.cells():
        folder = results.joinpath(*map(str, cell))
        method = project.methods[cell[3]]
        if not method.reference:
            recorded = results.joinpath(*cell[:2])
            add("trace_routing", cell[:2], recorded / "routing.json")
            if method.has_bases:
                add("fit_basis", (*cell[:2], cell[3]), recorded / "bases" / f"{cell[3]}.json")
            add("unlearn" if method.trains else "realign", cell, folder / "checkpoint.json")
        add("evaluate", cell, folder / "evaluation.json")
        add("attack", cell, folder / "attack.json")
    return list(left.values())


def _job(project: Project, results: Path, rule: str, cell: tuple) -> Job:
    """With hours, and memory of an embedded model, as recorded; else as estimated."""
    step = Step(cell[0], rule, cell[1], method=cell[2]) if rule == "fit_basis" else Step(cell[0], rule, *cell[1:4])
    recorded, need = _benchmarks(project, results, rule, cell), needed(project, step, results)
    memory = need and (need.total if need.gpus else need.host)
    training = rule in ("unlearn", "finetune_model")
    processes = project.processes(cell[0], cell[3] if len(cell) > 1 else None) if training else 1
    held = max(need.gpus, 1) if need else processes
    if recorded:
        hours = held * sum(float(row["s"]) for row in recorded) / len(recorded) / 3600
    else:  # GPUs that share the layers work one after the other
        hours = held / processes * _estimated_hours(project, step, results)
    if project.trained_from(cell[0]).source == "embedded":
        peaks = [float(row["max_rss"]) / 1e3 for row in recorded if row.get("max_rss", "-") not in ("-", "NA")]
        memory = max(peaks, default=TINY_MEMORY)
    return Job(rule, ".".join(map(str, cell)), hours, bool(recorded), need.gpus if need else 0, memory)


def _benchmarks(project: Project, results: Path, rule: str, cell: tuple) -> list[dict[str, str]]:
    """What Snakemake recorded of the same cell with another seed; else of measuring the same model and benchmark, which
    takes as long whatever trained it. Other rules and benchmarks count where arithmetic knows nothing of the model."""
    folder = results / "benchmarks" / rule
    name = ".".join(map(str, cell))
    patterns = [f"{name.rpartition('.')[0]}.*.tsv" if len(cell) == 5 else f"{name}.tsv"]
    if rule in ("evaluate", "attack"):
        patterns.append(f"{cell[0]}.{cell[1]}.*.tsv")
    if not sizes_of(project, cell[0]):
        patterns.append(f"{cell[0]}.*.tsv")
    for pattern in patterns:
        if files := list(folder.glob(pattern)):
            return [next(csv.DictReader(file.read_text().splitlines(), delimiter="\t")) for file in files]
    return []


def _estimated_hours(project: Project, step: Step, results: Path) -> float:
    if not isinstance(project.trained_from(step.model), PublishedModel):
        return TINY_SECONDS[step.what] / 3600
    if not sizes_of(project, step.model) or step.what == "prepare_model":
        return UNKNOWN_HOURS
    return hours_needed(project, step, results)


def that_count(jobs: Sequence[Job]) -> Sequence[Job]:
    """The jobs whose hours a plan adds up and a budget limits: those on GPUs, or all where none is."""
    return [job for job in jobs if job.gpus] or jobs


def check_budget(jobs: Sequence[Job], budget: float | None) -> None:
    """Raises ValueError, with the most expensive jobs, if all take more hours than `budget`."""
    counted = that_count(jobs)
    total = sum(job.hours for job in counted)
    if budget is not None and total > budget:
        worst = sorted(counted, key=lambda job: -job.hours)[:5]
        listed = "; ".join(f"{job.rule} {job.cell} {job.hours:.2f} h" for job in worst)
        raise ConfigError(f"{total:.1f} hours exceed the budget of {budget:g}. Most expensive: {listed}")
