"""Rows of a benchmark's files, checked for what later steps read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_jsonl


def read_rows(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines. Raises ConfigError, naming file and line, for one that lacks one of `keys`."""
    rows = read_jsonl(path)
    for line, row in enumerate(rows, 1):
        if missing := [key for key in keys if key not in row]:
            named = f"row {row['id']!r} has" if "id" in row else "a row has"
            raise ConfigError(
                f"{path}: {named} no `{missing[0]}` (line {line}); each needs {', '.join(f'`{key}`' for key in keys)}: "
                "correct the file, or run the step again that writes it"
            )
    return rows
