"""Outputs of the original model on documents: stored before training, in memory or in files, or computed by a copy.

N tokens that count, L MoE layers, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor
from tqdm import tqdm

from gripmoe.constraints.base import Tokens
from gripmoe.constraints.original_files import OriginalStore, StoredOutputs
from gripmoe.data.documents import Batch, documents_of
from gripmoe.moe import MoEModel
from gripmoe.moe.forcing import Routes
from gripmoe.moe.recording import places_of
from gripmoe.moe.states import router_states


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
    def fill(self, batches: Iterable[Batch], function: Callable[[Batch], Tensor], name: str) -> None:
        """Stores `function(batch)`, (rows, positions, ...), for every row of `batches`. `name` labels the progress. In
        a store it is part of the file's name, so each function needs a name of its own."""
        batches = list(batches)
        if not batches:
            return
        outputs = self._outputs(batches, function, name)
        first = next(outputs)
        outputs, some = chain([first], outputs), first[1][0]
        self._example = some[:0].clone()
        tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
        size = tokens * some.element_size() * math.prod(some.shape[1:])
        if self._store is None or size <= self._store.memory:
            for documents, values in outputs:
                self._kept.update(zip(documents, values, strict=True))
            return
        rows = (torch.cat(values) for _, values in outputs)
        self._kept = self._store.outputs(name, batches, rows, (some.dtype, (tokens, *some.shape[1:])))

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
                f"no original output for a document of {len(document)} tokens, {list(document[:8])}...: {self._remedy}"
            )
        return self._kept[document]

    def _outputs(
        self, batches: Sequence[Batch], function: Callable[[Batch], Tensor], name: str
    ) -> Iterator[tuple[list[tuple], list[Tensor]]]:
        """For each batch, its documents and their outputs."""
        for batch in tqdm(batches, desc=name, leave=False):
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
    name: str,
) -> OriginalCache | OriginalForward:
    """Outputs of `function` on the original model: on demand by the copy `original` if there is one, else computed now
    with `model` and stored, for `documents`."""
    if original is not None:
        return OriginalForward(original, function)
    cache = OriginalCache(model.originals)
    cache.fill(documents, lambda batch: function(model, batch), name)
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
