"""One command per rule: read files, call one function of the package, write files. Modules are named as the rule files.

Flags are paths; `--settings` is the part of the validated configuration, as JSON, that the step depends on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def one_thread_unless_set() -> None:
    """Two jobs side by side are faster than one job on two threads, for models this small."""
    import torch

    if not torch.cuda.is_available() and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)


def beside(output: Path) -> Path:
    """The provenance file of an output."""
    return output.with_name(f"{output.stem}.provenance.json")


@contextmanager
def training_together(output: Path, provenance: Path, *modules: str) -> Iterator[None]:
    """Around the training of one model by one process, or by those that torchrun has started. The first one holds the
    lock of the folder and writes what code, `modules`, has run."""
    from gripmoe import distributed
    from gripmoe.files import exclusive
    from gripmoe.provenance import recorded

    with distributed.launched(), ExitStack() as writing:
        if distributed.is_first():
            writing.enter_context(exclusive(output.parent))
            writing.enter_context(recorded(provenance, *modules))
        yield
