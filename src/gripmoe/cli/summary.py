"""`gripmoe summary`: the main table and the decided claims, on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def summary(
    *,
    runs: Annotated[Path, typer.Option("--runs", exists=True, dir_okay=False, help="The tidy table of all runs.")],
) -> None:
    """Print the main table and the decided claims.

    \b
    Example:
      gripmoe summary --runs results/tiny/runs_tiny.csv
    """
    from gripmoe.reporting.collect import load_runs
    from gripmoe.reporting.summary import decided_claims, main_table

    table = load_runs(runs)
    print(f"\n{main_table(table)}\n\n{decided_claims(table)}")
