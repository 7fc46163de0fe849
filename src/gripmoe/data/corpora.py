"""Documents from JSON lines, in shuffled batches for training, or in order for one pass over all documents."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from gripmoe.data.documents import IGNORED, Batch, Row, Span, collate, encode_all, opening
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import numbered_jsonl

TOKENS_PER_BATCH = 4000
DOCUMENTS_PER_CALL = 256  # of the tokenizer, so that a large corpus is not held as tokens


@dataclass(frozen=True)
class Corpora:
    """Tokenized documents to forget and to retain, and the token that pads them."""

    forget: Sequence[Row]
    retain: Sequence[Row]
    pad_id: int


def load_corpus(
    path: Path, tokenizer, max_length: int, limit: int | None = None, *, whole: bool = False, end_id: int | None = None
) -> list[Row]:
    """The first `limit` rows of a corpus, tokenized. The loss counts `text` and not `prompt`.

    A document is cut after `max_length` tokens. With `whole`, a longer document becomes several rows of at most
    `max_length` tokens, each beginning with the tokenizer's `opening`. With `end_id`, this token ends every document
    and is scored. Raises ConfigError, naming file and line, if there are no documents, if an id is missing or not
    unique, also among those rows, if a document has no text or fewer than two tokens, or if a prompt leaves no room
    for text.
    """
    begin = opening(tokenizer)
    if max_length <= len(begin):
        raise ConfigError(
            f"{path}: `max_length` {max_length} leaves no room beside {len(begin)} opening tokens; raise it"
        )
    numbered = numbered_jsonl(path, "text")[:limit]
    names = _checked_names(numbered, path)
    rows: list[Row] = []
    for (line, _), row in zip(numbered, rows_of((document for _, document in numbered), tokenizer), strict=True):
        if end_id is not None:
            row = Row(row.id, [*row.ids, end_id], [*row.labels, end_id])
        if len(row.ids) < 2:
            raise ConfigError(f"{path}: document {row.id!r} has fewer than two tokens (line {line}); remove the line")
        cut = Row(row.id, row.ids[:max_length], row.labels[:max_length])
        pieces = _pieces(row, max_length, begin) if whole else [cut]
        if any(all(label == IGNORED for label in piece.labels[1:]) for piece in pieces):
            raise ConfigError(f"{path}: the prompt of document {row.id!r} fills `max_length` {max_length}; raise it")
        for piece in pieces:
            if piece.id != row.id and piece.id in names:
                raise ConfigError(
                    f"{path}: {piece.id!r} is also the name of a part of {row.id!r}, a long one; rename it"
                )
        rows += pieces
        if limit is not None and len(rows) >= limit:
            break
    if not rows:
        raise ConfigError(f"{path}: there is no document; run the step again that writes it")
    return rows[:limit]


def _checked_names(numbered: Iterable[tuple[int, Mapping[str, Any]]], path: Path) -> set[str]:
    """The ids of numbered documents. Raises ConfigError for one that `load_corpus` refuses."""
    names: set[str] = set()
    for line, document in numbered:
        name = document.get("id")
        for key, value in {"text": document["text"], "prompt": document.get("prompt") or ""}.items():
            if not isinstance(value, str):
                raise ConfigError(f"{path}: `{key}` of document {name!r} is {value!r} (line {line}); give a text")
        if not isinstance(name, str | int | None):
            raise ConfigError(f"{path}: `id` is {name!r} (line {line}); give a text or a number")
        if not document["text"]:
            raise ConfigError(f"{path}: document {name!r} has no text (line {line}); remove the line, or give it one")
        if name is None or str(name) in names:
            raise ConfigError(
                f"{path}: each document needs an `id` of its own (got {name!r}) (line {line}); give it another"
            )
        names.add(str(name))
    return names


def rows_of(documents: Iterable[Mapping[str, Any]], tokenizer) -> Iterator[Row]:
    """Documents (`id`, `text`, and perhaps `prompt`), tokenized and not cut."""
    remaining = iter(documents)
    while some := list(islice(remaining, DOCUMENTS_PER_CALL)):
        yield from encode_all(tokenizer, ((str(document["id"]), _spans(document)) for document in some))


def _spans(document: Mapping[str, Any]) -> list[Span]:
    prompt = document.get("prompt")
    return [*([(prompt, False)] if prompt else []), (document["text"], True)]


def _pieces(row: Row, max_length: int, begin: list[int]) -> list[Row]:
    if len(row.ids) <= max_length:
        return [row]
    ids, labels = row.ids[len(begin) :], row.labels[len(begin) :]
    count = -(-len(ids) // (max_length - len(begin)))
    cuts = [round(len(ids) * i / count) for i in range(count + 1)]  # even cuts avoid pieces of one or two tokens
    return [
        Row(f"{row.id}#{i}", begin + ids[a:b], [IGNORED] * len(begin) + labels[a:b])
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
    ]


def epoch_rows(rows: Sequence[Row], batch_size: int, seed: int, step: int) -> list[Row]:
    """The rows of one step. Every epoch has a new shuffle, which depends only on seed and step, so a resumed run sees
    the same data. Raises ConfigError if the corpus is smaller than a batch."""
    if batch_size > len(rows):
        raise ConfigError(f"batch size {batch_size} exceeds the {len(rows)} documents of the corpus")
    epoch, number = divmod(step, len(rows) // batch_size)
    order = _shuffled(len(rows), seed, epoch)
    return [rows[i] for i in order[number * batch_size : (number + 1) * batch_size]]


def fitting_batch_size(rows: Sequence[Row], batch_size: int) -> int:
    """`batch_size`, or the size of a corpus that is smaller, with a warning."""
    if len(rows) < batch_size:
        warnings.warn(
            f"the corpus has {len(rows)} documents, fewer than a batch of {batch_size}: every batch takes all of them",
            stacklevel=2,
        )
    return min(batch_size, len(rows))


@lru_cache(maxsize=16)
def _shuffled(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"epoch {seed} {epoch}").shuffle(order)
    return order


def in_batches(rows: Sequence[Row], pad_id: int, rank: int = 0, processes: int = 1) -> list[Batch]:
    """Batches of about TOKENS_PER_BATCH padded tokens, with rows in order. Each of several processes gets its share of
    the rows, in the same number of batches. Raises ConfigError if the rows cannot be divided evenly."""
    if len(rows) % processes:
        raise ConfigError(f"{len(rows)} rows cannot be split over {processes} processes")
    batches: list[list[Row]] = [[]]
    longest = 0
    for together in zip(*[iter(rows)] * processes, strict=True):
        longest = max(longest, *(len(row.ids) for row in together))
        if batches[-1] and longest * (len(batches[-1]) + 1) > TOKENS_PER_BATCH:
            batches.append([])
            longest = max(len(row.ids) for row in together)
        batches[-1].append(together[rank])
    return [collate(batch, pad_id) for batch in batches]
