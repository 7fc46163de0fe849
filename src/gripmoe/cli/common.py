"""What several commands do beside reading files, calling the package and writing files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.provenance import entry_of, recorded
from gripmoe.config.reading import parse_settings
from gripmoe.config.world import Run, load_run
from gripmoe.io.errors import ConfigError


def beside(output: Path) -> Path:
    """The provenance file of an output."""
    return output.with_name(f"{output.stem}.provenance.json")


def measured(run_file: Path, benchmark_settings: str) -> tuple[Run, Benchmark]:
    """What --run says of a run, and --benchmark of how to measure it. Raises ConfigError if they are of two tasks."""
    run, benchmark = load_run(run_file), parse_settings(Benchmark, benchmark_settings, "--benchmark")
    if run.benchmark != benchmark.task:
        raise ConfigError(f"--benchmark: {run_file} is of another task; give it as {run.benchmark_name!r} has it")
    return run, benchmark


def identity_of(step: Callable, *files: Path | None, **settings: Any) -> dict[str, Any]:
    """What must be the same for a run of `step` to go on from what an interrupted one has left."""
    from gripmoe.io.files import file_digest

    digests = [[file.name, file_digest(file)] for file in files if file]
    return {"code": code_fingerprint(entry_of(step)), "files": digests, **settings}


@contextmanager
def training_together(output: Path, provenance: Path, step: Callable) -> Iterator[None]:
    """Around the training of one model by one process, or by those that torchrun has started. The first one holds the
    lock of the folder and writes the provenance record of `step`."""
    from gripmoe.io import distributed
    from gripmoe.io.locks import exclusive

    with distributed.launched(), ExitStack() as writing:
        if distributed.is_first():
            writing.enter_context(exclusive(output.parent))
            writing.enter_context(recorded(provenance, step))
        yield
