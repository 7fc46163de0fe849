"""`gripmoe manifest`: what artefacts are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gripmoe.cli.options import OutputFile, RunsFile
from gripmoe.io.files import write_json
from gripmoe.reporting.manifest import manifest as manifest_of


def manifest(
    *,
    files: Annotated[list[Path], typer.Argument(exists=True, help="Tables, figures, notebooks and tidy tables.")],
    runs: RunsFile,
    output: OutputFile,
) -> None:
    """Write what tables and figures are made of.

    \b
    Example:
      gripmoe manifest paper_figures/tiny/*.csv --runs results/tiny/runs_tiny.csv \\
          --output paper_figures/tiny/manifest.json
    """
    write_json(output, manifest_of(files, runs))
