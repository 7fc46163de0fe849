"""Documents as rows of tokens, and rows as padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100  # the label that torch's cross-entropy skips
Span = tuple[str, bool]  # (text, scored): the loss counts the tokens of scored spans only


@dataclass(frozen=True)
class Row:
    """One tokenized document. `labels` repeats `ids` where a token is scored and is IGNORED elsewhere."""

    id: str
    ids: list[int]
    labels: list[int]


def encode(tokenizer, spans: Iterable[Span], row_id: str = "", max_length: int | None = None) -> Row:
    """Tokenizes each span by itself and joins them behind the tokenizer's `opening`, which is not scored; cuts at
    `max_length` tokens. A text that begins with the BOS, as chat templates write it, gets no second one."""
    spans = list(spans)
    spelled_out = tokenizer.bos_token and spans[0][0].startswith(tokenizer.bos_token)
    ids = [] if spelled_out else opening(tokenizer)
    labels = [IGNORED] * len(ids)
    for text, scored in spans:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        labels += tokens if scored else [IGNORED] * len(tokens)
    return Row(row_id, ids[:max_length], labels[:max_length])


def opening(tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before every text: its BOS, or none; as in lm-evaluation-harness and MUSE."""
    text = tokenizer("a", return_special_tokens_mask=True)
    marked = zip(text["input_ids"], text["special_tokens_mask"], strict=True)
    return [token for token, _ in takewhile(lambda pair: pair[1], marked)]


@dataclass
class Batch:
    """Right-padded rows: input_ids, attention_mask, labels and the `weights` of tokens in a mean, if they differ; each
    (rows, positions)."""

    row_ids: list[str]
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    weights: Tensor | None = None

    def to(self, device) -> Batch:
        tensors = (self.input_ids, self.attention_mask, self.labels, self.weights)
        return Batch(self.row_ids, *(None if tensor is None else tensor.to(device) for tensor in tensors))

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


def attention_mask_of(inputs: Mapping[str, Tensor]) -> Tensor:
    """The (rows, positions) mask of a forward pass's inputs; all ones where none is given. Raises ValueError where
    these are no tensors of one such shape, or pack several documents into a row."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    for name, given in (("input_ids", ids), ("attention_mask", ids if mask is None else mask)):
        if not isinstance(given, Tensor) or given.dim() != 2 or given.shape != ids.shape:
            what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{name} must be a tensor, (rows, positions), of a shape with input_ids; this is {what}")
    mask = torch.ones_like(ids) if mask is None else mask
    positions = inputs.get("position_ids")
    if positions is not None and ids.shape[1] > 1:
        follows = mask[:, 1:].bool() & mask[:, :-1].bool()
        if (positions.to(mask.device).expand_as(ids).diff(dim=-1)[follows] != 1).any():
            raise ValueError("`position_ids` start again within a row (packing): give each document a row of its own")
    return mask


def as_batch(batch: Batch | Mapping[str, Tensor], device) -> Batch:
    """A batch of any data loader; row ids and labels are made up if there are none. Raises ValueError if it is no
    batch, KeyError without `input_ids`."""
    if isinstance(batch, Batch):
        return batch.to(device)
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch is a mapping with input_ids and perhaps attention_mask, not {type(batch).__name__}: give a list "
            "of such batches"
        )
    ids, mask = batch["input_ids"], attention_mask_of(batch)
    return Batch([str(n) for n in range(len(ids))], ids, mask, batch.get("labels", ids)).to(device)


def collate(rows: Sequence[Row], pad_id: int) -> Batch:
    """Rows as one batch, padded on the right with `pad_id`."""

    def padded(values: Iterable[list[int]], fill: int) -> Tensor:
        tensors = [torch.tensor(value, dtype=torch.long) for value in values]
        return pad_sequence(tensors, batch_first=True, padding_value=fill)

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


PASS_OVERHEAD = 100  # padded tokens that one more forward pass costs


def length_buckets(rows: Sequence[Row], tokens: int) -> list[list[Row]]:
    """Rows sorted by length, in groups of at most `tokens` padded tokens (a longer row is a group alone), at the least
    total cost: the padded tokens, and PASS_OVERHEAD for every group."""
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
