"""Soft constraints: what is added to the loss so that routing stays, or what it depends on (Sec. 5.1, App. F, ours).

N tokens that count, d hidden size, E experts, L MoE layers.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from gripmoe.constraints.base import Tokens
from gripmoe.data.documents import Batch
from gripmoe.io import distributed
from gripmoe.io.files import remove_halves
from gripmoe.io.locks import take_lock
from gripmoe.io.tensorfile import tensor_file
from gripmoe.moe import MoEModel
from gripmoe.moe.model import Routes


def _of(cached: OriginalCache | OriginalForward, tokens: Tokens) -> Tensor:
    """What the original model said of the tokens that count, (N, ...)."""
    return cached.of(tokens.input_ids, tokens.attention_mask).flatten(0, 1)[tokens.keep]


def _per_layer(model: MoEModel, batch: Batch, field: str) -> Tensor:
    """What every router saw or computed, (rows, positions, L, d or E)."""
    with model.record_routing() as recorder:
        model.model.model(**batch.inputs)
        trace = recorder.take()
    per_layer = [getattr(trace[layer], field) for layer in model.layers]
    return torch.stack([tensor.unflatten(0, batch.input_ids.shape) for tensor in per_layer], dim=2)


WAIT = 5.0  # seconds between two looks at what another run makes


@dataclass(frozen=True)
class OriginalStore:
    """Where caches keep what takes more than `memory` bytes: in files of `folder`, made once and found again by every
    run that asks the same (`model`, a digest of its weights and of the code that asks) about the same documents."""

    folder: Path
    model: str
    memory: float

    def file(self, what: str, batches: Sequence[Batch]) -> Path:
        digest = hashlib.sha256()
        for batch in batches:
            for tokens in documents_of(batch.input_ids, batch.attention_mask):
                digest.update(repr(tokens).encode())
        return self.folder / f"{what.replace(' ', '_')}{self._mark}{digest.hexdigest()[:16]}.safetensors"

    @property
    def _mark(self) -> str:
        return f"_{hashlib.sha256(self.model.encode()).hexdigest()[:16]}_"

    def remove_stale(self) -> None:
        """Removes files of other models and other code, and what killed runs have left half-written; nothing that a run
        reads or writes now."""
        for locked in self.folder.glob(".*.lock"):
            name = locked.name.removeprefix(".").removesuffix(".lock")
            if self._mark not in name or any(self.folder.glob(f".{name}.*.tmp")):
                with locked.open("a+") as lock:
                    if take_lock(lock, self.folder):
                        remove_halves(self.folder, name)
                        if self._mark not in name:
                            (self.folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class _OnDisk:
    """The entries of one document in a file of those of many."""

    file: safe_open
    start: int
    end: int

    def read(self) -> Tensor:
        return self.file.get_slice("values")[self.start : self.end]


class OriginalCache:
    """One tensor per document, or one per token of it, by a function of the original model; found by the document's
    tokens, and `by_labels` by its labels too. Held on the CPU, or where `store` says, in the dtype in which it was
    computed. Files of a store know no labels: give one or the other."""

    def __init__(self, store: OriginalStore | None = None, *, by_labels: bool = False) -> None:
        self._store, self._by_labels = store, by_labels
        self._kept: dict[tuple, Tensor | _OnDisk] = {}
        self._example: Tensor | None = None  # of a document without tokens

    def __len__(self) -> int:
        return len(self._kept)

    @torch.no_grad()
    def fill(self, batches: Iterable[Batch], function: Callable[[Batch], Tensor], what: str = "original model") -> None:
        """Keeps `function(batch)` of every row: (rows,) or, with entries per token, (rows, positions, ...)."""
        batches = list(batches)
        if not batches:
            return
        found = self._values(batches, function, what)
        first = next(found)
        some, found = first[1][0], chain([first], found)
        self._example = some[:0].clone() if some.ndim else torch.zeros_like(some)
        tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
        size = tokens * some.element_size() * math.prod(some.shape[1:])
        if self._store is None or not some.ndim or size <= self._store.memory:
            for keys, values in found:
                self._kept.update(zip(keys, values, strict=True))
            return
        file = self._store.file(what, batches)
        self._lock = _lock_of(file)  # shared until this cache is gone: nobody removes what somebody reads
        with _to_make(file, self._lock) as missing:
            if missing:
                shape = {"values": (some.dtype, (tokens, *some.shape[1:]))}
                whose = {"model": self._store.model, "what": what}
                with tensor_file(file, shape, whose) if distributed.is_first() else nullcontext(_forget) as put:
                    for _, values in found:
                        put("values", torch.cat(values))
                distributed.wait_for_all()
        opened, end = safe_open(file, framework="pt"), 0
        for batch in batches:
            for document in documents_of(batch.input_ids, batch.attention_mask):
                start, end = end, end + len(document)
                self._kept[document] = _OnDisk(opened, start, end)

    def _keys(self, documents: list[tuple[int, ...]], attention_mask: Tensor, labels: Tensor | None) -> list[tuple]:
        if not self._by_labels:
            return documents
        return list(zip(documents, documents_of(labels, attention_mask), strict=True))

    def _values(
        self, batches: Sequence[Batch], function: Callable[[Batch], Tensor], what: str
    ) -> Iterator[tuple[list[tuple], list[Tensor]]]:
        """Of each batch the keys of its documents and what is kept of each."""
        for batch in tqdm(batches, desc=what, leave=False):
            values, masks = function(batch).cpu(), batch.attention_mask.cpu().bool()
            kept = [
                value[mask].clone() if value.ndim else value.clone() for value, mask in zip(values, masks, strict=True)
            ]
            documents = documents_of(batch.input_ids, batch.attention_mask)
            yield self._keys(documents, batch.attention_mask, batch.labels), kept

    def of(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Tensor:
        """What was kept of each row, with zeros where it is padded, and of rows that the mask hides altogether.
        `labels` are those of a cache `by_labels`. Raises KeyError for a document that was not among those filled in."""
        kept = []
        documents = documents_of(input_ids, attention_mask)
        for tokens, key in zip(documents, self._keys(documents, attention_mask, labels), strict=True):
            if not tokens:
                kept.append(torch.zeros_like(self._example))
                continue
            if key not in self._kept:
                raise KeyError(
                    f"no original answer for a document of {len(tokens)} tokens, {list(tokens[:8])}...: give every document "
                    "that training uses beforehand"
                )
            found = self._kept[key]
            kept.append(found.read() if isinstance(found, _OnDisk) else found)
        if not self._example.ndim:
            return torch.stack(kept).to(input_ids.device)
        padded = self._example.new_zeros(len(kept), input_ids.shape[1], *self._example.shape[1:])
        for row, mask, value in zip(padded, attention_mask.cpu().bool(), kept, strict=True):
            row[mask] = value
        return padded.to(input_ids.device)


def _lock_of(file: Path) -> IO:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.with_name(f".{file.name}.lock").open("a+")


@contextmanager
def _to_make(file: Path, lock: IO) -> Iterator[bool]:
    """Whether the block is to make `file`. Of runs that ask for it at the same time one makes it; the others wait until
    it is there, or make it themselves if that one has died, whose half-written file is removed. Afterwards all share
    `lock`."""
    while True:
        there = ours = False
        if distributed.is_first():
            exists = file.exists()
            held = _shares(lock) if exists else take_lock(lock, file.parent)
            there = held and file.exists()
            ours = held and not exists and not there
        known = distributed.agreed({"there": float(there), "ours": float(ours)})
        if known["there"] or known["ours"]:
            break
        time.sleep(WAIT)  # awake now and then, or processes that train together would give each other up
    if ours:
        remove_halves(file.parent, file.name)
    yield not known["there"]
    if distributed.is_first():
        fcntl.flock(lock, fcntl.LOCK_SH)


def _shares(lock: IO) -> bool:
    """Takes a lock that others may share; False if a process has it alone."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forget(name: str, values: Tensor) -> None:
    """What the processes that write nothing do with their part."""


class OriginalForward:
    """The same from a forward pass of the original model itself, a second one in memory: for documents that nobody can
    list beforehand."""

    def __init__(self, original: MoEModel, function: Callable[[MoEModel, Batch], Tensor]):
        self._original, self._function = original, function

    @torch.no_grad()
    def of(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        batch = Batch([], input_ids, attention_mask, input_ids).to(self._original.model.device)
        return self._function(self._original, batch).to(input_ids.device)


def original_values(
    model: MoEModel,
    original: MoEModel | None,
    documents: Iterable[Batch],
    function: Callable[[MoEModel, Batch], Tensor],
    what: str,
) -> OriginalCache | OriginalForward:
    """Where `function` of the original model comes from: `original`, if there is a second model, else `model` as it is
    now, asked about `documents` once."""
    if original is not None:
        return OriginalForward(original, function)
    cache = OriginalCache(model.originals)
    cache.fill(documents, lambda batch: function(model, batch), what)
    return cache


class OriginalSets:
    """The original model's expert sets of documents, for routing replay: training under them, with live weights."""

    def __init__(self, model: MoEModel, batches: Iterable[Batch]):
        def stacked(batch: Batch) -> Tensor:
            routes = model.routes(**batch.inputs)
            return torch.stack([routes[layer].unflatten(0, batch.input_ids.shape) for layer in model.layers], dim=2)

        self._layers, self._sets = model.layers, OriginalCache(model.originals)
        self._sets.fill(batches, stacked, "original sets")

    def of(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        """The sets of these documents, as `MoEModel.force_routing` takes them. Raises KeyError for unknown ones."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        sets_TLk = self._sets.of(input_ids, mask).flatten(0, 1)
        return {layer: sets_TLk[:, number] for number, layer in enumerate(self._layers)}


def documents_of(input_ids: Tensor, attention_mask: Tensor) -> list[tuple[int, ...]]:
    """The tokens of each row (or its labels), without padding."""
    return [tuple(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True)]


def hidden_states(model: MoEModel, layer: int, batch: Batch) -> Tensor:
    """Output of decoder layer `layer`, (rows, positions, d)."""
    with model.record_hidden(layer) as outputs:
        model.model.model(**batch.inputs)
    return outputs[0]


def final_hidden_states(model: MoEModel, batch: Batch) -> Tensor:
    """What the language-model head reads: normed hidden states, (rows, positions, d)."""
    return model.model.model(**batch.inputs).last_hidden_state
