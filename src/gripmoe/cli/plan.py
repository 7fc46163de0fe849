"""`gripmoe plan`: the remaining jobs of a world, their cost, and whether they fit into memory."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from gripmoe.cli.options import ConfigFolder, World
from gripmoe.config.project import Project
from gripmoe.io.errors import ConfigError
from gripmoe.planning.cost import TFLOPS, Cost, Costs, Step, steps_of, what_would_fit
from gripmoe.planning.jobs import Job, check_budget, disk_needed, jobs_left, that_count
from gripmoe.planning.revisions import unpinned
from gripmoe.planning.status import run_status

LEAST = 1e-3  # of speeds and memories
MOST_EXPENSIVE = 5  # runs that a plan shows without --runs
NOTE = (
    "Steps are measured on fake tensors, at three and four layers; no constraint of Method A's Stage 2 is active.\n"
    "Hours are operations over --tflops and bytes over the link, until a job of the kind has been recorded."
)


def plan(
    *,
    world: World = "tiny",
    config: ConfigFolder = Path("workflow/config"),
    gpu_memory: Annotated[float, typer.Option(min=LEAST, help="GB of each GPU.")] = 141.0,
    host_memory: Annotated[float, typer.Option(min=LEAST, help="GB of each machine.")] = 2000.0,
    jobs_at_once: Annotated[int, typer.Option("--jobs", min=1, help="Jobs that run at once, for the disk.")] = 100,
    budget: Annotated[float | None, typer.Option(min=0, help="Hours; exit code 2 above them.")] = None,
    all_runs: Annotated[
        bool, typer.Option("--runs", help="List all runs, instead of the most expensive ones.")
    ] = False,
    tflops: Annotated[
        float, typer.Option(min=LEAST, help="Assumed speed of a GPU in TFLOP/s, for jobs without a recorded time.")
    ] = TFLOPS,
    methods_table: Annotated[
        bool, typer.Option("--methods-table", help="Print only a table of what a step of each method costs.")
    ] = False,
) -> None:
    """Show the remaining jobs of a world, their cost, and whether they fit into memory.

    The exit code is 2 if a step does not fit or the hours exceed the budget.

    \b
    Example:
      gripmoe plan --world paper --gpu-memory 141 --budget 200
    """
    project = Project(config, world)
    results = project.results
    costs = Costs(project, results)
    steps = steps_of(project)
    for step in tqdm(steps, desc="measuring steps", file=sys.stderr, disable=None):  # minutes, the first time
        costs.of(step)
    if methods_table:
        _print_methods(steps, costs, tflops)
        return
    jobs = jobs_left(project, results, tflops, costs)
    _print_rules(jobs)
    _print_runs(jobs, None if all_runs else MOST_EXPENSIVE)
    if outdated := sum(run_status(project, results, key)[0] == "outdated" for key in project.run_keys()):
        print(f"outdated runs, whose repetition is not in these hours: {outdated} (`gripmoe status` lists them)")
    needs = [cost for step in steps if (cost := costs.of(step))]
    _print_memory(needs, gpu_memory, host_memory)
    if disk := disk_needed(costs, jobs_at_once):
        parts = " + ".join(f"{size:.0f} {what}" for what, size in disk.items())
        print(f"disk, with {jobs_at_once} jobs at once, at most: {parts} = {sum(disk.values()):.0f} GB\n{NOTE}")
    if floating := [repository for *_, repository in unpinned(project)]:
        print(
            f"warning: without a revision, so read as the hub has them that day: {', '.join(floating)}; "
            f"`gripmoe pin --world {world}` prints the lines that pin them"
        )
    for reason in dict.fromkeys(costs.unmeasured.values()):
        print(f"warning: the memory of some steps is unknown: {reason}")
    check_budget(jobs, budget)
    if too_large := [need for need in needs if not need.fits(gpu_memory, host_memory)]:
        raise ConfigError(
            f"{len(too_large)} of {len(needs)} steps do not fit GPUs of {gpu_memory:g} GB and machines of "
            f"{host_memory:g} GB:{_what_would_fit(costs, too_large, gpu_memory, host_memory)}"
        )


def _grouped(things: Iterable[Any], attribute: str) -> dict[str, list]:
    """The things by their attribute, which may be an attribute's attribute."""
    groups, key = defaultdict(list), attrgetter(attribute)
    for thing in things:
        groups[key(thing)].append(thing)
    return groups


def _print_rules(jobs: Sequence[Job]) -> None:
    print(f"{'rule':<16}{'jobs':>6}{'hours each':>12}{'hours':>9}  from")
    for rule, listed in _grouped(jobs, "rule").items():
        hours, recorded = sum(job.hours for job in listed), sum(job.recorded for job in listed)
        sources = ["recorded times"] * (recorded > 0) + ["estimate"] * (recorded < len(listed))
        print(f"{rule:<16}{len(listed):>6}{hours / len(listed):>12.3f}{hours:>9.2f}  {' and '.join(sources)}")
    counted = that_count(jobs)
    name = "all on GPUs" if len(counted) < len(jobs) else "all"
    print(f"{name:<16}{len(counted):>6}{'':>12}{sum(job.hours for job in counted):>9.2f}")


def _print_runs(jobs: Sequence[Job], shown: int | None) -> None:
    """For each run, its hours over all GPUs, and the largest need of one of its steps: GPUs, and GB on each."""
    by_run = _grouped(jobs, "run")
    hours = {run: sum(job.hours for job in listed) for run, listed in by_run.items()}
    chosen = sorted(hours, key=lambda run: -hours[run])[:shown] if shown else hours
    unit = "GPU-hours" if any(job.gpus for job in jobs) else "hours"
    print(f"\n{'run':<56}{unit:>10}{'GPUs':>6}{'GB':>8}  to run")
    for run in chosen:
        memory = max((job.memory for job in by_run[run] if job.memory), default=None)
        print(
            f"{run:<56}{hours[run]:>10.3f}{max(job.gpus for job in by_run[run]):>6}"
            f"{'unknown' if memory is None else f'{memory:.1f}':>8}  {', '.join(job.rule for job in by_run[run])}"
        )
    if len(chosen) < len(hours):
        print(f"and {len(hours) - len(chosen)} others, which --runs lists")
    print()


def _print_memory(needs: Sequence[Cost], gpu_memory: float, host_memory: float) -> None:
    """A line for each objective (with the method that needs most) and each other step of a model."""
    for kind, listed in _grouped(needs, "step.kind").items():
        need, host = max(listed, key=lambda need: need.total), max(need.host for need in listed)
        parts = " + ".join(f"{size:.1f} {what}" for what, size in need.parts.items())
        under = f" under {need.step.method}" * bool(need.step.method)
        print(
            f"{kind}{under}, {need.gpus} GPU{'s' * (need.gpus > 1)}: {parts} = {need.total:.0f} GB of {gpu_memory:g} "
            f"on each{' (does not fit)' * (need.total > gpu_memory)}; host: {host:.0f} GB of {host_memory:g}"
            f"{' (does not fit)' * (host > host_memory)}"
        )


def _what_would_fit(costs: Costs, too_large: Sequence[Cost], gpu_memory: float, host_memory: float) -> str:
    """A line for each model and objective, with the changes that were tried for the method that needs most."""
    lines = []
    for kind, listed in _grouped(too_large, "step.kind").items():
        most = max(listed, key=lambda cost: cost.total).step
        found = " or ".join(what_would_fit(costs, most, gpu_memory, host_memory))
        methods = f" ({', '.join(cost.step.method for cost in listed)})" * bool(most.method)
        lines.append(f"\n  {kind}{methods}\n    fits with {found or 'none of the changes that were tried, alone'}")
    return "".join(lines)


def _print_methods(steps: Sequence[Step], costs: Costs, tflops: float) -> None:
    """A Markdown table of what a step costs, by model, objective and method."""
    names = ("weights", "gradients", "states", "bases", "activations")
    columns = ["model", "step", "method", *names, "GB of each GPU", "TFLOP a step", "hours of 10,000 steps"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for cost in filter(None, map(costs.of, steps)):
        step, sizes = cost.step, [f"{cost.parts.get(name, 0):.1f}" for name in names]
        hours = f"{cost.seconds(tflops) * 1e4 / 3600:.2f}" if step.what == "unlearn" else ""
        row = [step.model, step.name, step.method, *sizes]
        print(f"| {' | '.join([*row, f'{cost.total:.1f}', f'{cost.tflop:.1f}', hours])} |")
