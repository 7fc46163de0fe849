"""The questions and corpora of any benchmark, embedded or published."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gripmoe.config.benchmarks import Data
from gripmoe.data.muse import news_files
from gripmoe.data.published import benchmark_files
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import make_world
from gripmoe.worlds.muse import muse_tables, write_repository


def files_of(data: Data) -> dict[str, list[dict]]:
    """The rows of each file of a data folder, by the file's name without `.jsonl`."""
    if data.source == "embedded" and data.kind == "news":
        with tempfile.TemporaryDirectory() as folder:
            write_repository(muse_tables(make_world(data.world_seed).news, data.world_seed), Path(folder))
            return news_files(folder)
    if data.source == "embedded":
        return wmdp_files(make_world(data.world_seed), data.world_seed, data.retain)
    if data.source == "muse":
        return news_files(data.repository, data.revision, data.rows)
    return benchmark_files(data)
