"""What the model before unlearning says of each document, computed once and kept, so that no second model is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from tqdm import tqdm

from gripmoe.data.documents import Batch
from gripmoe.moe import MoEModel
from gripmoe.moe.model import Routes


class ReferenceCache:
    """One tensor per document, or one per token of it, by a function of the original model; found by the document's
    tokens. Held on the CPU in the dtype in which it was computed."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], Tensor] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @torch.no_grad()
    def fill(self, batches: Iterable[Batch], function: Callable[[Batch], Tensor], what: str = "reference") -> None:
        """Keeps `function(batch)` of every row: (rows,) or, with entries per token, (rows, positions, ...)."""
        for batch in tqdm(batches, desc=what, leave=False):
            values, masks = function(batch).cpu(), batch.attention_mask.cpu().bool()
            documents = _documents(batch.input_ids, batch.attention_mask)
            for tokens, value, mask in zip(documents, values, masks, strict=True):
                self._kept[tokens] = value[mask].clone() if value.ndim else value.clone()

    def of(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """What was kept of each row, with zeros where it is padded, and of rows that the mask hides altogether. Raises
        KeyError for a document that was not among those filled in."""
        kept = []
        example = next(iter(self._kept.values()), None)
        for tokens in _documents(input_ids, attention_mask):
            if not tokens:
                kept.append(example[:0] if example.ndim else torch.zeros_like(example))
                continue
            if tokens not in self._kept:
                raise KeyError(
                    f"no reference for a document of {len(tokens)} tokens, {list(tokens[:8])}...: give every document "
                    "that training uses beforehand"
                )
            kept.append(self._kept[tokens])
        if not example.ndim:
            return torch.stack(kept).to(input_ids.device)
        padded = example.new_zeros(len(kept), input_ids.shape[1], *example.shape[1:])
        for row, mask, value in zip(padded, attention_mask.cpu().bool(), kept, strict=True):
            row[mask] = value
        return padded.to(input_ids.device)


class ReferenceForward:
    """The same from a forward pass of the original model itself, a second one in memory: for documents that nobody can
    list beforehand."""

    def __init__(self, original: MoEModel, function: Callable[[MoEModel, Batch], Tensor]):
        self._original, self._function = original, function

    @torch.no_grad()
    def of(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        batch = Batch([], input_ids, attention_mask, input_ids).to(self._original.model.device)
        return self._function(self._original, batch).to(input_ids.device)


def reference_of(
    model: MoEModel,
    original: MoEModel | None,
    documents: Iterable[Batch],
    function: Callable[[MoEModel, Batch], Tensor],
    what: str,
) -> ReferenceCache | ReferenceForward:
    """Where `function` of the original model comes from: `original`, if there is a second model, else `model` as it is
    now, asked about `documents` once."""
    if original is not None:
        return ReferenceForward(original, function)
    cache = ReferenceCache()
    cache.fill(documents, lambda batch: function(model, batch), what)
    return cache


class OriginalSets:
    """The original model's expert sets of documents, for routing replay: training under them, with live weights."""

    def __init__(self, model: MoEModel, batches: Iterable[Batch]):
        def stacked(batch: Batch) -> Tensor:
            routes = model.routes(**batch.inputs)
            return torch.stack([routes[layer].unflatten(0, batch.input_ids.shape) for layer in model.layers], dim=2)

        self._layers, self._sets = model.layers, ReferenceCache()
        self._sets.fill(batches, stacked, "original sets")

    def of(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        """The sets of these documents, as `MoEModel.force_routing` takes them. Raises KeyError for unknown ones."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        sets_TLk = self._sets.of(input_ids, mask).flatten(0, 1)
        return {layer: sets_TLk[:, number] for number, layer in enumerate(self._layers)}


def _documents(input_ids: Tensor, attention_mask: Tensor) -> list[tuple[int, ...]]:
    return [tuple(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True)]


def hidden_states(model: MoEModel, layer: int, batch: Batch) -> Tensor:
    """Output of decoder layer `layer`, (rows, positions, d)."""
    with model.record_hidden(layer) as outputs:
        model.model.model(**batch.inputs)
    return outputs[0]


def final_hidden_states(model: MoEModel, batch: Batch) -> Tensor:
    """What the language-model head reads: normed hidden states, (rows, positions, d)."""
    return model.model.model(**batch.inputs).last_hidden_state
