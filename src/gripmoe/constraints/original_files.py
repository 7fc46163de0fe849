"""Files of what the original model computes of documents. Several runs may share them."""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import safe_open
from torch import Tensor

from gripmoe.data.documents import Batch, documents_of
from gripmoe.io import distributed
from gripmoe.io.files import remove_halves
from gripmoe.io.locks import take_lock
from gripmoe.io.tensorfile import tensor_file

WAIT = 5.0  # seconds between two checks of a file that another run writes


@dataclass(frozen=True)
class OriginalStore:
    """Files in `folder` for caches that take more than `memory` bytes. A file is written once, and read by every run
    with the same `model` (a digest of weights and code), name of the function, and documents.

    A file's lock is exclusive while a run writes the file, and shared while runs read it."""

    folder: Path
    model: str
    memory: float

    def file(self, name: str, batches: Sequence[Batch]) -> Path:
        digest = hashlib.sha256()
        for batch in batches:
            for tokens in documents_of(batch.input_ids, batch.attention_mask):
                digest.update(repr(tokens).encode())
        return self.folder / f"{name.replace(' ', '_')}{self._mark}{digest.hexdigest()[:16]}.safetensors"

    def outputs(
        self, name: str, batches: Sequence[Batch], rows: Iterable[Tensor], shape: tuple[torch.dtype, tuple[int, ...]]
    ) -> StoredOutputs:
        """The outputs of the documents in `batches`, from their file. If several runs miss the file at the same time,
        one writes `rows` to it and the others wait. If the writer dies, another writes."""
        file = self.file(name, batches)
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = file.with_name(f".{file.name}.lock").open("a+")
        while (known := distributed.agreed(_look(file, lock)))["waits"]:
            time.sleep(WAIT)  # awake now and then, or processes that train together would give each other up
        if known["missing"]:
            whose = {"model": self.model, "name": name}
            if distributed.is_first():
                remove_halves(self.folder, file.name)
            writes = tensor_file(file, {"values": shape}, whose) if distributed.is_first() else nullcontext()
            with writes as put:
                for some in rows:  # computed in every process
                    if put:
                        put("values", some)
            distributed.wait_for_all()
        if distributed.is_first():
            fcntl.flock(lock, fcntl.LOCK_SH)
        return StoredOutputs(file, lock, batches)

    def remove_stale(self) -> None:
        """Removes files of other models and other code, and half-written files of killed runs, but no file that a run
        reads or writes now."""
        for locked in self.folder.glob(".*.lock"):
            name = locked.name.removeprefix(".").removesuffix(".lock")
            if self._mark not in name or any(self.folder.glob(f".{name}.*.tmp")):
                with locked.open("a+") as lock:
                    if take_lock(lock, self.folder):
                        remove_halves(self.folder, name)
                        if self._mark not in name:
                            (self.folder / name).unlink(missing_ok=True)

    @property
    def _mark(self) -> str:
        return f"_{hashlib.sha256(self.model.encode()).hexdigest()[:16]}_"


class StoredOutputs:
    """The outputs of documents in a file, read when they are asked for. The file's `lock` is held as long as this is
    in use."""

    def __init__(self, file: Path, lock: IO, batches: Sequence[Batch]):
        self._file, self._lock = safe_open(file, framework="pt"), lock
        self._rows: dict[tuple, slice] = {}
        end = 0
        for batch in batches:
            for document in documents_of(batch.input_ids, batch.attention_mask):
                self._rows[document] = slice(end, end := end + len(document))

    def __contains__(self, document: tuple) -> bool:
        return document in self._rows

    def __getitem__(self, document: tuple) -> Tensor:
        return self._file.get_slice("values")[self._rows[document]]


def _look(file: Path, lock: IO) -> dict[str, float]:
    """Whether this run has to wait for another run that writes `file`, and whether `file` is missing. Takes the lock
    unless the run has to wait."""
    waits = missing = False
    if distributed.is_first():
        exists = file.exists()
        waits = not take_lock(lock, file.parent, shared=exists)
        missing = not waits and not file.exists()
        if missing and exists:  # removed in between, and the lock is shared
            waits = True
    return {"waits": waits, "missing": missing}
