"""`gripmoe prepare-data`: the questions and corpora of a benchmark."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gripmoe.config.benchmarks import Data
from gripmoe.config.provenance import recorded
from gripmoe.config.reading import parse_settings
from gripmoe.data.muse import news_files
from gripmoe.data.published import benchmark_files
from gripmoe.io.files import write_jsonl
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import make_world
from gripmoe.worlds.muse import muse_tables, write_repository


def prepare_data(args) -> None:
    """Writes a benchmark's questions and corpora as JSON lines."""
    data = parse_settings(Data, args.settings)
    with recorded(args.output / "provenance.json", prepare_data):
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
            write_jsonl(args.output / f"{name}.jsonl", rows)
