"""What several scripts need to run the commands and the workflow of the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from gripmoe.cli.main import main
from gripmoe.config.world import NO_OBJECTIVE

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "workflow" / "config"


def under_every_objective(runs: pd.DataFrame) -> pd.DataFrame:
    """Without the methods that were measured under some objectives alone."""
    objectives = runs[runs.objective != NO_OBJECTIVE].groupby("method").objective.nunique()
    return runs[~runs.method.isin(objectives.index[objectives < objectives.max()])]


def command(name: str, *arguments: object, **flags: object) -> None:
    """Runs a command of `gripmoe`. Exits if it fails."""
    given = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
    if main(list(map(str, [name, *arguments, *given]))):
        raise SystemExit(1)


def snakemake(world: str, targets: list[Path], cores: int) -> list[str]:
    """The command that makes the targets, for the repository's root."""
    arguments = [sys.executable, "-m", "gripmoe.cli.fork_server", "snakemake"]
    arguments += ["--profile", str(ROOT / "workflow" / "profiles" / "local"), "--cores", str(cores)]
    return [*arguments, "--config", f"world={world}", "--", *(str(target.relative_to(ROOT)) for target in targets)]
