"""What produced a result: code fingerprint, package versions, device, time, peak memory."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.io.files import read_json, write_json

PACKAGES = ("gripmoe", "torch", "transformers", "lm_eval", "datasets", "numpy", "snakemake")


def provenance_of(output: Path) -> Path:
    """The provenance file of an output."""
    return output.with_name(f"{output.stem}.provenance.json")


_counted = 0.0  # CPU-seconds of this process that earlier steps have recorded


@contextmanager
def recorded(path: Path, step: Callable, resumed: bool | None = None) -> Iterator[None]:
    """Writes a provenance record of `step`, the function around the block, if the block ends without an error. By
    default a step counts as resumed if a `state*.pt` lies beside the record: an interrupted step has left it. The
    seconds are of the block alone, the CPU-seconds those since the process began or recorded another step."""
    global _counted
    if resumed is None:
        resumed = any(path.parent.glob("state*.pt"))
    started, code = time.perf_counter(), code_fingerprint(entry_of(step))
    yield
    used = _cpu_seconds()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_json(
        path,
        {
            "step": entry_of(step),
            "code": code,
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "packages": package_versions(PACKAGES),
            "python": platform.python_version(),
            "device": _device(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "resumed": resumed,
            "seconds": round(time.perf_counter() - started, 2),
            "cpu_seconds": round(used - _counted, 2),  # Snakemake's figure may be 30 s old
            "peak_memory_gib": round(peak_kib / 2**20, 3),
        },
    )
    _counted = used


def step_seconds(folder: Path) -> dict[str, list[float]]:
    """CPU-seconds of the finished steps below a folder, by the name of their function. A step that was resumed knows
    those of its last part alone, and is left out."""
    seconds: dict[str, list[float]] = {}
    for file in sorted(folder.rglob("*provenance.json")):
        record = read_json(file)
        if "cpu_seconds" in record and not record.get("resumed"):
            seconds.setdefault(record["step"].partition(":")[2], []).append(record["cpu_seconds"])
    return seconds


def entry_of(step: Callable) -> str:
    """A function as `code_fingerprint` names it."""
    return f"{step.__module__}:{step.__name__}"


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """The version of each package; None if it is not installed."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _cpu_seconds() -> float:
    """Of this process and of those that it has started."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _device() -> str:
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU"
