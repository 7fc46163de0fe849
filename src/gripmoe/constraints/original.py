"""Outputs of the original model on documents: stored before training, in memory or in files, or computed by a copy.

N tokens that count, L MoE layers, k experts per token.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, compress
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
from gripmoe.moe.forcing import Routes
from gripmoe.moe.recording import places_of
from gripmoe.moe.states import router_states

WAIT = 5.0  # seconds between two checks of a file that another run writes


class OriginalCache:
    """Stored outputs of a function of the original model, one for each token. The key of a document is its tokens.
    Tensors keep their dtype. They are on the CPU, or in files of `store`. `remedy` ends the error of a document that is
    not stored."""

    def __init__(
        self,
        store: OriginalStore | None = None,
        remedy: str = "give every document that training uses beforehand, or `original=` a copy of the model",
    ) -> None:
        self._store, self._remedy = store, remedy
        self._kept: dict[tuple, Tensor] | StoredOutputs = {}
        self._example: Tensor | None = None  # the entry of a document without tokens

    @torch.no_grad()
    def fill(self, batches: Iterable[Batch], function: Callable[[Batch], Tensor], what: str = "original model") -> None:
        """Stores `function(batch)`, (rows, positions, ...), for every row of `batches`."""
        batches = list(batches)
        if not batches:
            return
        answers = self._answers(batches, function, what)
        first = next(answers)
        answers, some = chain([first], answers), first[1][0]
        self._example = some[:0].clone()
        tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
        size = tokens * some.element_size() * math.prod(some.shape[1:])
        if self._store is None or size <= self._store.memory:
            for documents, values in answers:
                self._kept.update(zip(documents, values, strict=True))
            return
        rows = (torch.cat(values) for _, values in answers)
        self._kept = self._store.outputs(what, batches, rows, (some.dtype, (tokens, *some.shape[1:])))

    def of(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The stored output of each row, with zeros for padding and for rows that the mask hides altogether. Raises
        KeyError for a document that `fill` did not get."""
        kept = [self._found(document) for document in documents_of(input_ids, attention_mask)]
        padded = self._example.new_zeros(*input_ids.shape, *self._example.shape[1:])
        padded[attention_mask.cpu().bool()] = torch.cat(kept)
        return padded.to(input_ids.device)

    def of_counted(self, tokens: Tokens) -> Tensor:
        """The stored outputs of the tokens that count, (N, ...), without padding them first."""
        documents = documents_of(tokens.input_ids, tokens.attention_mask)
        found = torch.cat([self._found(document) for document in documents]).to(tokens.keep.device)
        return found.index_select(0, places_of(tokens.keep[tokens.attention_mask.flatten().bool()]))

    def _found(self, document: tuple[int, ...]) -> Tensor:
        if not document:
            return self._example
        if document not in self._kept:
            raise KeyError(
                f"no original answer for a document of {len(document)} tokens, {list(document[:8])}...: {self._remedy}"
            )
        return self._kept[document]

    def _answers(
        self, batches: Sequence[Batch], function: Callable[[Batch], Tensor], what: str
    ) -> Iterator[tuple[list[tuple], list[Tensor]]]:
        """For each batch, its documents and their outputs."""
        for batch in tqdm(batches, desc=what, leave=False):
            values, masks = function(batch).cpu(), batch.attention_mask.cpu().bool()
            kept = [value[mask] for value, mask in zip(values, masks, strict=True)]
            yield documents_of(batch.input_ids, batch.attention_mask), kept


class OriginalForward:
    """Replaces an `OriginalCache` for documents that are not known before training: a copy of the original model
    computes the output on demand."""

    def __init__(self, original: MoEModel, function: Callable[[MoEModel, Batch], Tensor]):
        self._original, self._function = original, function

    @torch.no_grad()
    def of(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        batch = Batch([], input_ids, attention_mask, input_ids).to(self._original.model.device)
        return self._function(self._original, batch).to(input_ids.device)

    def of_counted(self, tokens: Tokens) -> Tensor:
        """The outputs of the tokens that count, (N, ...)."""
        return self.of(tokens.input_ids, tokens.attention_mask).flatten(0, 1)[tokens.keep]


def original_values(
    model: MoEModel,
    original: MoEModel | None,
    documents: Iterable[Batch],
    function: Callable[[MoEModel, Batch], Tensor],
    what: str,
) -> OriginalCache | OriginalForward:
    """Outputs of `function` on the original model: on demand by the copy `original` if there is one, else computed now
    with `model` and stored, for `documents`."""
    if original is not None:
        return OriginalForward(original, function)
    cache = OriginalCache(model.originals)
    cache.fill(documents, lambda batch: function(model, batch), what)
    return cache


class OriginalSets:
    """The original model's expert sets of documents, for routing replay: training with these sets and the current
    router weights."""

    def __init__(self, model: MoEModel, batches: Iterable[Batch]):
        remedy = "under replay, give every document that training uses as `retain` or `forget`"
        self._layers, self._sets = model.layers, OriginalCache(model.originals, remedy)
        self._sets.fill(batches, lambda batch: router_states(model, batch, "top_k_Nk"), "original sets")

    def of(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        """The sets of these documents, in the form of `MoEModel.force_routing`. Raises KeyError for an unknown
        document."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        sets_TLk = self._sets.of(input_ids, mask).flatten(0, 1)
        return {layer: sets_TLk[:, number] for number, layer in enumerate(self._layers)}


def documents_of(input_ids: Tensor, attention_mask: Tensor) -> list[tuple[int, ...]]:
    """The tokens of each row, without padding."""
    rows = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
    return [tuple(compress(ids, mask)) for ids, mask in rows]


@dataclass(frozen=True)
class OriginalStore:
    """Files in `folder` for caches that take more than `memory` bytes. A file is written once, and read by every run
    with the same `model` (a digest of weights and code), function and documents.

    A file's lock is exclusive while a run writes the file, and shared while runs read it."""

    folder: Path
    model: str
    memory: float

    def file(self, what: str, batches: Sequence[Batch]) -> Path:
        digest = hashlib.sha256()
        for batch in batches:
            for tokens in documents_of(batch.input_ids, batch.attention_mask):
                digest.update(repr(tokens).encode())
        return self.folder / f"{what.replace(' ', '_')}{self._mark}{digest.hexdigest()[:16]}.safetensors"

    def outputs(
        self, what: str, batches: Sequence[Batch], rows: Iterable[Tensor], shape: tuple[torch.dtype, tuple[int, ...]]
    ) -> StoredOutputs:
        """The outputs of the documents in `batches`, from their file. If several runs miss the file at the same time,
        one writes `rows` to it and the others wait. If the writer dies, another writes."""
        file = self.file(what, batches)
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = file.with_name(f".{file.name}.lock").open("a+")
        while (known := distributed.agreed(_look(file, lock)))["waits"]:
            time.sleep(WAIT)  # awake now and then, or processes that train together would give each other up
        if known["missing"]:
            whose = {"model": self.model, "what": what}
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
