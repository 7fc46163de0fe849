"""Converts retain and forget data from common forms to batches with one document per row."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gripmoe.data.documents import IGNORED, Batch, Row, attention_mask_of, collate
from gripmoe.data.packing import SEGMENTS, segments_of, starts_anew

FORMS = (
    "batches (mappings with `input_ids` and, if rows are padded, `attention_mask`, both (rows, positions)), a "
    "DataLoader of such batches, a dataset whose rows have `input_ids`, or texts, or rows with `text`, and a "
    "`tokenizer`"
)
ROWS = 8  # rows of a batch
LENGTHS = ("seq_lengths", "cu_seq_lens_q", "cu_seqlens")  # a number for each packed document, not for each token
Padding = tuple[int | None, bool]  # the padding token, if it is known, and whether it also ends texts


def batches_of(data: Any, name: str, model: nn.Module | None = None, tokenizer: Any = None) -> list[Batch]:
    """Converts `data`, in any of FORMS, to batches on the CPU. Each packed document gets its own row.

    Errors call the data `name`. `model` gives the vocabulary, `tokenizer` encodes texts, and both give the padding
    token. Warns if rows seem padded but have no mask. Raises ValueError for any other form, KeyError for a batch
    without `input_ids`."""
    batches = []
    padding = _padding(model, tokenizer)
    for number, item in enumerate(_items(data, name, tokenizer, padding)):
        where = f"{name}[{number}]"
        batch = item.to("cpu") if isinstance(item, Batch) else _batch(item, where, padding)
        if model is not None:
            _check_vocabulary(batch, where, model.get_input_embeddings().weight.shape[0])
        batches.append(batch)
    return batches


def listed(data: Any) -> list[Any]:
    """The items of `data`. A map-style dataset ends where its length says; it need not raise IndexError there."""
    if hasattr(data, "__len__") and not hasattr(data, "__iter__"):
        return [data[number] for number in range(len(data))]
    return list(data)


def holds_texts(data: Any) -> bool:
    """Whether a tokenizer is needed to read `data`."""
    if columns := getattr(data, "column_names", None):
        return "input_ids" not in columns and "text" in columns
    return isinstance(data, str) or (isinstance(data, Sequence) and any(_text(item) is not None for item in data))


def _text(item: Any) -> str | None:
    """The text of an item that is one, or of a row that has one and is not encoded yet."""
    if isinstance(item, Mapping) and "input_ids" not in item:
        item = item.get("text")
    return item if isinstance(item, str) else None


def seems_padded(ids: Tensor, model: nn.Module) -> bool:
    """Whether a row begins or ends with padding: with the model's padding token, with two of them if the token also
    ends texts, or with three equal tokens if the model has no padding token."""
    return _seems_padded(ids, *_padding(model, None))


def _items(data: Any, name: str, tokenizer: Any, padding: Padding) -> Iterable[Any]:
    columns = getattr(data, "column_names", None)
    if isinstance(data, Mapping | Batch):
        return [data]
    if isinstance(data, Tensor):
        return [{"input_ids": data}]
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # iterating over a table gives the names of its columns
        raise ValueError(f"`{name}` is {_described(data)}: give its texts, such as `list(table['text'])`")
    if holds_texts(data):
        if not callable(tokenizer):
            raise ValueError(f"`{name}` holds texts, and `tokenizer` is {tokenizer!r}: give the model's tokenizer")
        if isinstance(data, str) and Path(data).suffix in (".jsonl", ".json", ".txt", ".csv", ".parquet"):
            raise ValueError(f"`{name}` is {data!r}, which seems the name of a file: give its texts")
        texts = [data] if isinstance(data, str) else data["text"] if columns else [_text(item) for item in data]
        if None in texts:
            raise ValueError(f"`{name}` mixes texts with other items: give {FORMS}")
        return _rows(({"input_ids": tokenizer(text)["input_ids"]} for text in texts), name, padding)
    if columns and "input_ids" not in columns:
        given = f"`{name}` has the columns {', '.join(columns)}"
        raise ValueError(f"{given}: give `input_ids`, or `text` and a tokenizer{_hint(columns)}")
    try:
        items = listed(data)
    except TypeError:
        raise ValueError(f"`{name}` is {_described(data)}: give {FORMS}") from None
    if holds_texts(items) and not isinstance(data, list):
        return _items(items, name, tokenizer, padding)  # of a generator, a stream, or a column of texts
    items = [{"input_ids": item} if isinstance(item, Tensor) else item for item in items]
    if items and all(isinstance(item, Mapping) and _is_row(item.get("input_ids")) for item in items):
        return _rows(items, name, padding)
    return items


def _is_row(ids: Any) -> bool:
    return getattr(_tensor(ids), "ndim", None) == 1


def _rows(rows: Iterable[Mapping[str, Any]], name: str, padding: Padding) -> Iterator[dict[str, Tensor]]:
    """Padded batches of `rows`; each row holds one document or several packed ones."""
    documents: list[Tensor] = []
    for number, row in enumerate(rows):
        known = [key for key in ("input_ids", "attention_mask", "seq_lengths", *SEGMENTS) if row.get(key) is not None]
        item = {key: _tensor(row[key]) for key in known}
        item = {key: value if key in LENGTHS or value.ndim != 1 else value[None] for key, value in item.items()}
        batch = _batch(item, f"{name}[{number}]", padding)
        documents += [ids[mask.bool()] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    for start in range(0, len(documents), ROWS):
        yield _padded(documents[start : start + ROWS]).inputs


def _padded(documents: Sequence[Tensor]) -> Batch:
    rows = ((str(number), document.tolist()) for number, document in enumerate(documents))
    return collate([Row(name, ids, ids) for name, ids in rows], pad_id=0)


def _batch(item: Any, where: str, padding: Padding) -> Batch:
    """Converts a mapping to a batch and unpacks documents. Raises ValueError or KeyError, naming `where`, if it
    cannot."""
    item, ids = _checked(item, where)
    try:
        segments, mask = segments_of(item), attention_mask_of(item, packed=True)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    counts = mask.bool()
    if item.get("attention_mask") is None and _seems_padded(ids, *padding):
        warnings.warn(
            f"{where} has no `attention_mask`, and rows begin or end with padding, which then counts as text: give "
            "the mask",
            stacklevel=5,
        )
    ids = ids.masked_fill(~counts, 0)  # collators may write other numbers where the mask is 0
    if segments is not None and starts_anew(segments, mask).any():
        documents = []
        for row, segment, keep in zip(ids, segments, counts, strict=True):
            lengths = torch.unique_consecutive(segment[keep], return_counts=True)[1]
            documents += row[keep].split(lengths.tolist())
        return _padded(documents)
    labels = ids.masked_fill(~counts, IGNORED)
    return Batch([str(n) for n in range(len(ids))], ids, counts.long(), labels).to("cpu")


def _checked(item: Any, where: str) -> tuple[dict[str, Any], Tensor]:
    """The mapping with lists converted to tensors, and its `input_ids`."""
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} is a {type(item).__name__}: give {FORMS}")
    if "input_ids" not in item:
        splits = "; of these splits give one" if any(hasattr(value, "column_names") for value in item.values()) else ""
        only = ", ".join(map(str, item)) or "nothing"
        raise KeyError(f"{where} has no `input_ids`, only {only}: give {FORMS}{splits or _hint(item)}")
    item = {key: _tensor(value) for key, value in item.items()}
    ids = item["input_ids"]
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        what = f"of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else _described(ids)
        what += " of rows that differ in length: pad them" if isinstance(ids, list) else ""
        raise ValueError(f"{where}: `input_ids` must be a tensor, (rows, positions); this is {what}")
    if not ids.numel():
        raise ValueError(f"{where} is empty: `input_ids` has the shape {tuple(ids.shape)}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{where}: `input_ids` are token numbers, and these are {ids.dtype}")
    item["input_ids"] = ids = ids.long()
    if (lengths := item.pop("seq_lengths", None)) is not None:  # TRL packs so
        flat = lengths.flatten() if isinstance(lengths, Tensor) else torch.as_tensor(sum(map(list, lengths), []))
        item["cu_seq_lens_q"] = F.pad(flat.cumsum(0), (1, 0))
    return item, ids


def _tensor(value: Any) -> Any:
    """Converts lists and arrays of numbers to tensors. Rows of different lengths stay as they are."""
    if value is None or isinstance(value, Tensor | str | int | float):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def _padding(model: nn.Module | None, tokenizer: Any) -> Padding:
    for owner in (tokenizer, getattr(model, "config", None)):
        if getattr(owner, "pad_token_id", None) is not None:
            return owner.pad_token_id, owner.pad_token_id == getattr(owner, "eos_token_id", None)
    return None, True


def _seems_padded(ids: Tensor, token: int | None, ends_texts: bool) -> bool:
    run = 3 if token is None else 2 if ends_texts else 1
    ends = [ids[:, :run], ids[:, -run:]] if ids.shape[1] > run else []
    return any(((end == (end[:, :1] if token is None else token)).all(dim=1)).any() for end in ends)


def _check_vocabulary(batch: Batch, where: str, size: int) -> None:
    counted = batch.input_ids[batch.attention_mask.bool()]
    outside = counted[(counted < 0) | (counted >= size)]
    if len(outside):
        raise ValueError(f"{where}: the token {int(outside[0])} is not in the model's vocabulary of {size}")


def _hint(names: Iterable[str]) -> str:
    return "; of conversations, apply the chat template first" if {"messages", "prompt"} & {*names} else ""


def _described(data: Any) -> str:
    return repr(data) if data is None or isinstance(data, int | float | str) else f"a {type(data).__name__}"
