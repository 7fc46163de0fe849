"""`gripmoe collect`: tidy tables of all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gripmoe.cli.options import OutputFile, read_file, written_file
from gripmoe.config.provenance import provenance_of, recorded
from gripmoe.io.files import read_json, write_json
from gripmoe.reporting.collect import collect_runs, computed_with


def collect(
    *,
    folders: Annotated[list[Path], typer.Argument(exists=True, file_okay=False, help="The folders of the runs.")],
    output: OutputFile,
    histories: Annotated[Path, written_file("--histories", "The table to write of all checks.")],
    answers: Annotated[Path, written_file("--answers", "The table to write of all questions.")],
    attacks: Annotated[Path, written_file("--attacks", "The table to write of what attacks ask.")],
    known: Annotated[
        Path | None, read_file("--known", "A table of other runs: originals, retrained and unconstrained models.")
    ] = None,
) -> None:
    """Gather all runs in tidy tables.

    --output has a row per run and metric, the other tables one per run and check or item.

    \b
    Example:
      gripmoe collect results/tiny/tiny_a/wmdp_tiny/gd/*/0 --output runs.csv \\
          --histories histories.csv --answers answers.csv --attacks attacks.csv
    """
    record = provenance_of(output)
    with recorded(record, collect):
        collect_runs(folders, output, histories, answers, attacks, known)
    write_json(record, read_json(record) | {"runs": computed_with(folders)})  # artefacts quote this
