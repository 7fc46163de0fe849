"""`gripmoe prepare-data`: the questions and corpora of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gripmoe.cli.options import Settings
from gripmoe.config.benchmarks import Data
from gripmoe.config.provenance import recorded
from gripmoe.config.reading import parse_settings
from gripmoe.io.files import write_jsonl
from gripmoe.worlds.files import files_of


def prepare_data(
    *,
    settings: Settings,
    output: Annotated[Path, typer.Option("--output", file_okay=False, help="The folder to write JSON lines to.")],
) -> None:
    """Write the questions and corpora of a benchmark.

    \b
    Example:
      gripmoe prepare-data --settings '{"source": "embedded", "kind": "letters"}' --output data
    """
    data = parse_settings(Data, settings)
    with recorded(output / "provenance.json", prepare_data):
        for name, rows in files_of(data).items():
            write_jsonl(output / f"{name}.jsonl", rows)
