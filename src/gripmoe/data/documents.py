"""Converts documents to rows of tokens, and rows to padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from gripmoe.data.packing import PACKED, SEGMENTS, segments_of, starts_anew

IGNORED = -100  # the label that torch's cross-entropy ignores
Span = tuple[str, bool]  # (text, scored): the loss counts the tokens of scored spans only


@dataclass(frozen=True)
class Row:
    """One tokenized document. `labels` repeats `ids` where a token is scored and is IGNORED elsewhere."""

    id: str
    ids: list[int]
    labels: list[int]


def encode(tokenizer, spans: Iterable[Span], row_id: str = "", max_length: int | None = None) -> Row:
    """Tokenizes one document, as `encode_all` does."""
    return encode_all(tokenizer, [(row_id, list(spans))], max_length)[0]


def encode_all(tokenizer, documents: Iterable[tuple[str, Sequence[Span]]], max_length: int | None = None) -> list[Row]:
    """Tokenizes documents (id, spans). Each span is tokenized separately, and the spans are joined after the
    tokenizer's `opening`, which is not scored. Cuts at `max_length` tokens. A text that already begins with the BOS, as
    from a chat template, gets no second one. One call for all documents takes a fraction of the time of many calls."""
    documents, begin, bos = list(documents), opening(tokenizer), tokenizer.bos_token
    texts = [text for _, spans in documents for text, _ in spans]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    rows = []
    for row_id, spans in documents:
        ids = [] if bos and spans[0][0].startswith(bos) else list(begin)
        labels = [IGNORED] * len(ids)
        for (_, scored), tokens in zip(spans, encoded, strict=False):
            ids += tokens
            labels += tokens if scored else [IGNORED] * len(tokens)
        rows.append(Row(row_id, ids[:max_length], labels[:max_length]))
    return rows


def opening(tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before every text: the BOS or nothing, as in lm-evaluation-harness and
    MUSE."""
    text = tokenizer("a", return_special_tokens_mask=True)
    marked = zip(text["input_ids"], text["special_tokens_mask"], strict=True)
    return [token for token, _ in takewhile(lambda pair: pair[1], marked)]


@dataclass
class Batch:
    """Right-padded rows: `input_ids`, `attention_mask` and `labels`, each (rows, positions). In unlearning,
    `scored_per_pass` and `tokens_per_pass` are the scored and all tokens of a step, divided by its passes in all
    processes."""

    row_ids: list[str]
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    scored_per_pass: float | None = None
    tokens_per_pass: float | None = None

    def to(self, device) -> Batch:
        tensors = ("input_ids", "attention_mask", "labels")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


def attention_mask_of(inputs: Mapping[str, Tensor], *, packed: bool = False) -> Tensor:
    """The attention mask of a forward pass's inputs, (rows, positions), on their device; all ones if there is none.
    Raises ValueError if inputs and mask are not tensors of this shape, or, unless `packed`, if a row has several
    documents."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if packed and isinstance(mask, Tensor) and mask.dim() == 4:
        mask = None
    for name, given in (("input_ids", ids), ("attention_mask", ids if mask is None else mask)):
        if not isinstance(given, Tensor) or given.dim() != 2 or given.shape != ids.shape:
            what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{name} must be a tensor, (rows, positions), of a shape with input_ids; this is {what}")
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.device)
    if not packed and (segments := segments_of(inputs)) is not None and starts_anew(segments, mask).any():
        told = [name for name in SEGMENTS if inputs.get(name) is not None] or ["attention_mask"]
        raise ValueError(PACKED.format("`, `".join(told)))
    return mask


def as_batch(batch: Batch | Mapping[str, Tensor], device) -> Batch:
    """Converts a batch of any data loader to a `Batch`, with default row ids and labels if there are none. Raises
    ValueError for anything else, KeyError without `input_ids`."""
    if isinstance(batch, Batch):
        return batch.to(device)
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch is a mapping with input_ids and perhaps attention_mask, not {type(batch).__name__}: give a list "
            "of such batches"
        )
    ids, mask, labels = batch["input_ids"], attention_mask_of(batch), batch.get("labels")
    return Batch([str(n) for n in range(len(ids))], ids, mask, ids if labels is None else labels).to(device)


def documents_of(input_ids: Tensor, attention_mask: Tensor) -> list[tuple[int, ...]]:
    """The tokens of each row, without padding."""
    rows = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
    return [tuple(compress(ids, mask)) for ids, mask in rows]


def collate(rows: Sequence[Row], pad_id: int) -> Batch:
    """Rows as one batch, padded on the right with `pad_id`."""
    width = max(len(row.ids) for row in rows)

    def padded(values: Iterable[list[int]], fill: int) -> Tensor:  # as one list, which becomes a tensor at once
        return torch.tensor([[*value, *[fill] * (width - len(value))] for value in values], dtype=torch.long)

    ids, mask = padded((row.ids for row in rows), pad_id), padded(([1] * len(row.ids) for row in rows), 0)
    return Batch([row.id for row in rows], ids, mask, padded((row.labels for row in rows), IGNORED))


def collate_inputs(batches: Sequence[Batch]) -> Batch:
    """Several batches as one, padded on the right to the widest."""
    width = max(batch.input_ids.shape[1] for batch in batches)

    def joined(name: str, fill: int) -> Tensor:
        tensors = (getattr(batch, name) for batch in batches)
        return torch.cat([F.pad(t, (0, width - t.shape[1]), value=fill) for t in tensors])

    ids = [row_id for batch in batches for row_id in batch.row_ids]
    return Batch(ids, joined("input_ids", 0), joined("attention_mask", 0), joined("labels", IGNORED))


PASS_OVERHEAD = 100  # the cost of one more forward pass, in padded tokens
TOKENS_PER_PASS = 4000  # padded, where nothing is trained


def length_buckets(rows: Sequence[Row], tokens: int = TOKENS_PER_PASS) -> list[list[Row]]:
    """Rows sorted by length, in groups of at most `tokens` padded tokens (a longer row is a group alone). The grouping
    has the least total cost: all padded tokens, plus PASS_OVERHEAD for every group."""
    rows = sorted(rows, key=lambda row: len(row.ids))
    cost, start = [0.0], [0]  # of the first n rows, and where their last group begins
    for end in range(1, len(rows) + 1):
        longest = len(rows[end - 1].ids)
        fitting = max(1, tokens // max(1, longest))
        candidates = range(max(0, end - fitting), end)
        best = min(candidates, key=lambda first: cost[first] + (end - first) * longest)
        cost.append(cost[best] + (end - best) * longest + PASS_OVERHEAD)
        start.append(best)
    groups: list[list[Row]] = []
    end = len(rows)
    while end:
        groups.append(rows[start[end] : end])
        end = start[end]
    return groups[::-1]
