"""`gripmoe why`: why a run would be repeated."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from gripmoe.cli.options import World
from gripmoe.config.project import Project
from gripmoe.io.errors import ConfigError
from gripmoe.planning.status import changes

CHANGED = "settings of a step that runs share, or a file of your own, have changed (`snakemake -n` shows both versions)"


def why(
    *,
    run: Annotated[str, typer.Argument(help="model.benchmark.objective.method.seed, or the beginning of that.")],
    world: World = "tiny",
) -> None:
    """Explain why a run would be repeated.

    The reason may be a changed setting, changed code, or one of Snakemake's own.

    \b
    Example:
      gripmoe why tiny_a.wmdp_tiny.gd.expert_specific
    """
    project = Project(Path("workflow", "config"), world)  # the folder that the Snakefile reads
    keys = {str(key): key for key in project.run_keys()}
    if not any(f"{name}.".startswith(f"{run}.") for name in keys):
        close = difflib.get_close_matches(run, keys, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of them is {next(iter(keys))}"
        raise ConfigError(f"no run of {world} is or begins with {run}; {hint}")
    profile = Path("workflow", "profiles", "local")  # whose settings decide too what is repeated
    command = [sys.executable, "-m", "snakemake", "-n", "--profile", str(profile), "--config", f"world={world}"]
    dry = subprocess.run(command, capture_output=True, text=True, check=False)
    output = dry.stdout + dry.stderr
    if dry.returncode:
        raise ConfigError(output.strip()[-1500:])
    jobs: dict[str, dict[str, str]] = defaultdict(dict)
    for block in re.split(r"\n(?=(?:local)?rule )", output):
        name = ".".join(re.findall(r"\w+=([^,\n]+)", "".join(re.findall(r"wildcards: .*", block))))
        reason = re.search(r"reason: (.*)", block)
        if name and reason and f"{name}.".startswith(f"{run}."):
            jobs[name][re.match(r"(?:local)?rule (.*?):", block)[1]] = reason[1]
    for name, reasons in jobs.items():
        causes = changes(project, project.results, keys[name]) if name in keys else []
        causes = causes or [re.sub(r"^Params have changed.*", CHANGED, next(iter(reasons.values())))]
        print(f"{name}: {', '.join(reasons)} would run, because {'; '.join(causes)}")
    if not jobs:
        print(f"nothing of {run} would run")
