"""Documents from their files: JSON lines, as the embedded world and the loaders of real data write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gripmoe.data.documents import Batch, Row, collate, encode
from gripmoe.files import read_jsonl

TOKENS_PER_BATCH = 4000


def load_corpus(path: Path, tokenizer, max_length: int, limit: int | None = None) -> list[Row]:
    """The first `limit` rows of a corpus, tokenized; the loss counts `text` and not `prompt`. Raises ValueError, naming
    the file, for a row without a text or with fewer than two tokens."""
    rows = []
    for document in read_jsonl(path)[:limit]:
        if not document.get("text"):
            raise ValueError(f"{path}: document {document.get('id')!r} has no text")
        spans = [(document.get("prompt", ""), False), (document["text"], True)]
        row = encode(tokenizer, [span for span in spans if span[0]], document["id"], max_length)
        if len(row.ids) < 2:
            raise ValueError(f"{path}: document {row.id!r} has fewer than two tokens")
        rows.append(row)
    return rows


def in_batches(rows: Sequence[Row], pad_id: int) -> list[Batch]:
    """Batches of about TOKENS_PER_BATCH padded tokens, the rows in their order."""
    batches: list[list[Row]] = [[]]
    for row in rows:
        longest = max(len(r.ids) for r in (*batches[-1], row))
        if batches[-1] and longest * (len(batches[-1]) + 1) > TOKENS_PER_BATCH:
            batches.append([])
        batches[-1].append(row)
    return [collate(batch, pad_id) for batch in batches]
