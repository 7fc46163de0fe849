"""Documents as token rows: spans to ids and labels, rows to padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # the label that torch's cross-entropy skips
Span = tuple[str, bool]  # (text, scored): the loss counts the tokens of scored spans only


@dataclass(frozen=True)
class Row:
    """One tokenized document. `labels` repeats `ids` where a token is scored and is IGNORED elsewhere."""

    id: str
    ids: list[int]
    labels: list[int]


def encode(tokenizer, spans: Iterable[Span], row_id: str = "", max_length: int | None = None) -> Row:
    """Tokenizes each span without special tokens and joins them; cuts at `max_length` tokens."""
    ids: list[int] = []
    labels: list[int] = []
    for text, scored in spans:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        labels += tokens if scored else [IGNORED] * len(tokens)
    return Row(row_id, ids[:max_length], labels[:max_length])


@dataclass
class Batch:
    """Right-padded rows: input_ids, attention_mask and labels, each (rows, longest)."""

    row_ids: list[str]
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    def to(self, device) -> Batch:
        moved = (tensor.to(device) for tensor in (self.input_ids, self.attention_mask, self.labels))
        return Batch(self.row_ids, *moved)

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


def collate(rows: Sequence[Row], pad_id: int) -> Batch:
    """Rows as one batch, padded on the right with `pad_id`."""
    longest = max(len(row.ids) for row in rows)
    input_ids = torch.full((len(rows), longest), pad_id)
    labels = torch.full((len(rows), longest), IGNORED)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for i, row in enumerate(rows):
        n = len(row.ids)
        input_ids[i, :n] = torch.tensor(row.ids)
        labels[i, :n] = torch.tensor(row.labels)
        mask[i, :n] = 1
    return Batch([row.id for row in rows], input_ids, mask, labels)


def length_buckets(rows: Sequence[Row], tokens: int) -> list[list[Row]]:
    """Rows sorted by length and cut into groups of at most `tokens` padded tokens (a longer row stands alone)."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if groups and (len(groups[-1]) + 1) * len(row.ids) <= tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
