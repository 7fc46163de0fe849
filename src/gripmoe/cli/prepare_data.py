"""`gripmoe prepare-data`: the questions and corpora of a benchmark."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gripmoe.cli.options import Settings
from gripmoe.config.benchmarks import Data
from gripmoe.config.provenance import recorded
from gripmoe.config.reading import parse_settings
from gripmoe.data.muse import news_files
from gripmoe.data.published import benchmark_files
from gripmoe.io.files import write_jsonl
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import make_world
from gripmoe.worlds.muse import muse_tables, write_repository


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
        if data.source == "embedded" and data.kind == "news":
            with tempfile.TemporaryDirectory() as folder:
                write_repository(muse_tables(make_world(data.world_seed).news, data.world_seed), Path(folder))
                files = news_files(folder)
        elif data.source == "embedded":
            files = wmdp_files(make_world(data.world_seed), data.world_seed, data.retain)
        elif data.source == "muse":
            files = news_files(data.repository, data.revision, data.rows)
        else:
            files = benchmark_files(data)
        for name, rows in files.items():
            write_jsonl(output / f"{name}.jsonl", rows)
