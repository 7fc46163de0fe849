"""Atomic writes, and readers whose errors name the file, the line and the remedy."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from gripmoe.io.errors import ConfigError

ASIDE = ".replaced"
YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, of most installations, is ten times as fast
WRITE_AGAIN = "correct the file, or run the step of the workflow again that writes it"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`, for a file or a folder. It replaces `path` if the block ends without an
    error. Raises ConfigError if the disk is full or the folder may not be written; the old content stays. If the
    process is killed while it replaces a folder, the old folder is in `aside(path)`; the next write, or
    `remove_halves`, puts it back."""
    handled = sys.exception()  # what the caller deals with is the context of an error of the block, and not its cause
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _put_back(path)
        try:
            yield temporary
            if temporary.is_dir():
                for inside in temporary.rglob("*"):
                    _sync(inside)
            _sync(temporary)
            if temporary.is_dir() and path.is_dir():
                os.rename(path, aside(path))  # os.replace does not replace a folder that holds files
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            _put_back(path)
            remove(temporary)
    except Exception as error:
        if _says(error, NO_ROOM, handled):
            resumes = ". What was there before is whole, and the run resumes from it" if path.exists() else ""
            raise ConfigError(f"{path}: no room to write it; make room and start again{resumes}") from error
        if _says(error, REFUSED, handled):
            raise ConfigError(
                f"{path}: this user may not write it, or the disk is read-only ({error}); name another folder, or have "
                "this one made writable"
            ) from error
        raise


def aside(path: Path) -> Path:
    """The path of the old folder while a new one replaces it."""
    return path.with_name(f".{path.name}{ASIDE}")


def _put_back(path: Path) -> None:
    """Ends an interrupted replacement: removes the old folder if the new one is in place, else moves the old one
    back."""
    if path.exists():
        remove(aside(path))
    elif aside(path).exists():
        os.rename(aside(path), path)


def _sync(path: Path) -> None:
    """Flushes a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems sync folders by themselves
            raise
    finally:
        os.close(descriptor)


def _says(error: BaseException | None, codes: tuple[int, ...], handled: BaseException | None) -> bool:
    """Whether the system gave one of these errors. torch raises its own error after the system's; safetensors quotes
    the system's error in its message."""
    if error is None or error is handled:
        return False
    return (
        getattr(error, "errno", None) in codes
        or any(f"(os error {code})" in str(error) for code in codes)
        or _says(error.__context__, codes, handled)
    )


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_halves(folder: Path, name: str = "*") -> None:
    """Cleans up after killed processes: removes half-written files that match `name`, and ends replacements of folders.
    No other process may be writing them."""
    for old in folder.glob(f".{name}{ASIDE}"):
        _put_back(folder / old.name[1 : -len(ASIDE)])
    for half in folder.glob(f".{name}.*.tmp"):
        remove(half)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_text(path: Path) -> str:
    """The text of a file. Like all readers here, raises ConfigError if `path` is missing or not UTF-8."""
    with _errors_named(path):
        content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: not UTF-8 (line {line}); save the file as UTF-8") from None


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with _errors_named(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {WRITE_AGAIN}") from None


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=True) + "\n")


def read_json(path: Path) -> Any:
    return _from_json(path, read_text(path))


def _from_json(path: Path, text: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ConfigError(f"{path}: not valid JSON (line {line}: {error.msg}); {WRITE_AGAIN}") from None


def write_yaml(path: Path, value: Any) -> None:
    write_text(path, yaml.safe_dump(value, sort_keys=False, width=120))


def read_yaml(path: Path, check: Callable[[yaml.Node | None], object] | None = None) -> Any:
    """The content of a YAML file. `check` sees its nodes, which know their lines, before they become values."""
    text = read_text(path)
    try:
        loader = YAML(text)
        node = loader.get_single_node()
        if check:
            check(node)
        return loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as error:
        line, why = error.problem_mark.line + 1, error.problem
    except yaml.reader.ReaderError as error:
        line, why = text.count("\n", 0, error.position) + 1, error.reason
    raise ConfigError(f"{path}: not valid YAML (line {line}: {why}); {WRITE_AGAIN}")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The JSON objects of a file, one per line; blank lines do not count. Raises ConfigError also for an object that
    lacks one of `keys`."""
    return [row for _, row in numbered_jsonl(path, *keys)]


def numbered_jsonl(path: Path, *keys: str) -> list[tuple[int, dict[str, Any]]]:
    """`read_jsonl` with the number of each object's line, from 1."""
    rows, content = [], read_text(path)
    if content.lstrip().startswith("["):
        raise ConfigError(f"{path}: this is one JSON array; write one JSON object a line")
    for line, text in enumerate(io.StringIO(content, newline="\n"), 1):  # strings may hold other line breaks
        if not text.strip():
            continue
        row = _from_json(path, text.rstrip("\n"), line)
        if not isinstance(row, dict):
            raise ConfigError(f"{path}: not a JSON object (line {line}); {WRITE_AGAIN}")
        if "\\ud" in text.lower() and not _is_unicode(row):
            raise ConfigError(f"{path}: half of a character, a lone surrogate (line {line}); remove it from the text")
        if missing := [key for key in keys if key not in row]:
            named = f"row {row['id']!r} has" if "id" in row else "a row has"
            needed = ", ".join(f"`{key}`" for key in keys)
            raise ConfigError(f"{path}: {named} no `{missing[0]}` (line {line}); each needs {needed}: {WRITE_AGAIN}")
        rows.append((line, row))
    return rows


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows with the columns of the first row. Raises ValueError without rows."""
    if not rows:
        raise ValueError(f"no rows to write to {path}")
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        # Before Python 3.13, csv quotes a carriage return only if it is part of the line terminator.
        lines = SimpleNamespace(write=lambda row: file.write(row.removesuffix("\r\n") + "\n"))
        writer = csv.DictWriter(lines, fieldnames=list(rows[0]), lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(read_text(path), newline="")))
