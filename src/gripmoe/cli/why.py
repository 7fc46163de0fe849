"""`gripmoe why`: why a run would run again."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gripmoe.cli.options import World
from gripmoe.config.fingerprint import fingerprint_now
from gripmoe.config.grid import Project
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, read_yaml


def why(
    *,
    run: Annotated[str, typer.Argument(help="model.benchmark.objective.method.seed, or the beginning of that.")],
    world: World = "tiny",
) -> None:
    """Explain why a run would run again.

    The reason is a setting that has changed, the code, or Snakemake's own.

    \b
    Example:
      gripmoe why tiny_a.wmdp_tiny.gd.expert_specific

    \f
    Raises ConfigError if Snakemake refuses, or if there is no such run.
    """
    project = Project(Path("workflow", "config"), world)  # as the Snakefile does
    known = [".".join(map(str, key)) for key in project.run_keys()]
    if not any(f"{name}.".startswith(f"{run}.") for name in known):
        close = difflib.get_close_matches(run, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of them is {known[0]}"
        raise ConfigError(f"no run of {world} is or begins with {run}; {hint}")
    command = [sys.executable, "-m", "snakemake", "-n", "--config", f"world={world}"]
    dry = subprocess.run(command, capture_output=True, text=True, check=False)
    output = dry.stdout + dry.stderr
    if dry.returncode:
        raise ConfigError(output.strip()[-1500:])
    jobs = defaultdict(dict)
    for block in re.split(r"\n(?=(?:local)?rule )", output):
        names = re.search(r"wildcards: (.*)", block)
        name = ".".join(part.split("=", 1)[1] for part in names[1].split(", ")) if names else ""
        reason = re.search(r"reason: (.*)", block)
        if name and reason and f"{name}.".startswith(f"{run}."):
            jobs[name][re.match(r"(?:local)?rule (.*?):", block)[1]] = reason[1]
    for name, reasons in jobs.items():
        causes = _changes(project, name.split(".")) or [next(iter(reasons.values()))]
        print(f"{name}: {', '.join(reasons)} would run, because {'; '.join(causes)}")
    if not jobs:
        print(f"nothing of {run} would run")


def _changes(project: Project, run: list[str]) -> list[str]:
    """What has changed of a run since it ran: settings, and the code of its steps."""
    folder = Path("results", project.results_name, *run)
    if len(run) < 5 or not (folder / "run.yaml").exists():
        return []
    model, benchmark, objective, method, seed = run
    before = _flat(read_yaml(folder / "run.yaml"))
    now = _flat(project.run(model, benchmark, objective, method, int(seed)).model_dump(mode="json"))
    settings = [
        f"{key} is {now.get(key)}, was {before.get(key)}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]
    steps = [read_json(file) for file in sorted(folder.glob("*.provenance.json"))]
    return settings + [
        f"the code of {step['step']} has changed"
        for step in steps
        if "step" in step and fingerprint_now(step["step"]) != step["code"]
    ]


def _flat(settings: Mapping, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    flat = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
