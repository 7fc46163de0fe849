"""`gripmoe explore`: one page of all runs, attacks and questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gripmoe.cli.options import OutputFile, RunsFile


def explore(
    *,
    folders: Annotated[list[Path], typer.Argument(exists=True, file_okay=False, help="The data of the benchmarks.")],
    runs: RunsFile,
    output: OutputFile,
) -> None:
    """Write one page of all runs, attacks and questions.

    The page contains its data and needs no network. The command also reads the other tables that `gripmoe collect`
    has written beside --runs.

    \b
    Example:
      gripmoe explore results/tiny/data/wmdp_tiny --runs results/tiny/runs_tiny.csv \\
          --output paper_figures/tiny/explorer.html
    """
    from gripmoe.reporting.explorer import write_explorer

    world = runs.stem.removeprefix("runs_").replace("_", " ")
    write_explorer(output, runs, folders, title=f"Runs of the world {world}")
