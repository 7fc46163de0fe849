"""Functions that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.provenance import entry_of, provenance_of, recorded
from gripmoe.config.reading import parse_settings
from gripmoe.config.world import Run, load_run
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest

BY_TORCHRUN = "TORCHELASTIC_RUN_ID"  # torchrun alone sets this variable; batch scripts export WORLD_SIZE too


def run_and_benchmark(run_file: Path, benchmark_settings: str) -> tuple[Run, Benchmark]:
    """The run of --run and the benchmark of --benchmark. Raises ConfigError if their tasks differ."""
    run, benchmark = load_run(run_file), parse_settings(Benchmark, benchmark_settings, "--benchmark")
    if run.benchmark != benchmark.task:
        raise ConfigError(f"--benchmark: {run_file} is of another task; give it as {run.benchmark_name!r} has it")
    return run, benchmark


def identity_of(step: Callable, *files: Path | None, **settings: Any) -> dict[str, Any]:
    """The identity of a step. A repetition continues from the state of an interrupted one only if both identities are
    equal."""
    digests = [[file.name, file_digest(file)] for file in files if file]
    return {"code": code_fingerprint(entry_of(step)), "files": digests, **settings}


def start_together(processes: int) -> None:
    """Replaces this process by torchrun with the same command in several processes, unless torchrun has started it."""
    if processes > 1 and BY_TORCHRUN not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        os.execvp(torchrun[0], [*torchrun, "-m", "--", "gripmoe.cli.main", *sys.argv[1:]])


@contextmanager
def training_together(output: Path, step: Callable, identity: dict[str, Any]) -> Iterator[Path]:
    """Around the training of one model by one process, or by all that torchrun has started. The first process holds the
    lock of the folder and writes the provenance record of `step`. Yields the file of the state, which is removed if a
    step of another identity has left it."""
    from gripmoe.io import distributed
    from gripmoe.io.locks import exclusive
    from gripmoe.training.checkpoint import claim_state

    state_file = output.with_name("state.pt")
    with distributed.launched(), ExitStack() as writing:
        if distributed.is_first():
            writing.enter_context(exclusive(output.parent))
        claim_state(state_file, identity)
        if distributed.is_first():
            writing.enter_context(recorded(provenance_of(output), step))
        yield state_file
