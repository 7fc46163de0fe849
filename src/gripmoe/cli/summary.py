"""`gripmoe summary`: print the main table and the decided claims."""

from __future__ import annotations

from gripmoe.cli.options import RunsFile


def summary(*, runs: RunsFile) -> None:
    """Print the main table, and the statements that hold or do not hold.

    \b
    Example:
      gripmoe summary --runs results/tiny/runs_tiny.csv
    """
    from gripmoe.reporting.runs import load_runs
    from gripmoe.reporting.summary import decided_claims, main_table

    table = load_runs(runs, kind=None)
    print(f"\n{main_table(table)}\n\n{decided_claims(table)}")
