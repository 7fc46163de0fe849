"""safetensors files whose metadata is checked on reading, and which can be written piece by piece."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gripmoe.io.errors import ConfigError
from gripmoe.io.files import atomic_path

METADATA = "gripmoe"  # one entry of the header: several would have no fixed order
DTYPES = {  # their names in a safetensors header
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int16: "I16",
    torch.bool: "BOOL",
}


@contextmanager
def tensor_file(
    path: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> Iterator[Callable[[str, Tensor], None]]:
    """Writes a safetensors file atomically, in pieces: the yielded `put(name, rows)` appends rows to a tensor. The same
    content gives the same bytes. Raises ValueError if a tensor does not get all rows of its shape in `shapes`."""
    header: dict[str, dict] = {"__metadata__": {METADATA: json.dumps(dict(metadata))}}
    offset, filled = 0, {}
    for name in sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name)):  # aligned: the widest first
        dtype, shape = shapes[name]
        end = offset + dtype.itemsize * prod(shape)
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        filled[name], offset = offset, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.truncate(start + offset)

        def put(name: str, rows: Tensor) -> None:
            stored = rows.detach().to("cpu", shapes[name][0]).contiguous()
            file.seek(start + filled[name])
            file.write(stored.reshape(-1).view(torch.uint8).numpy())
            filled[name] += stored.nbytes

        yield put
        for name, reached in filled.items():
            if reached != header[name]["data_offsets"][1]:
                raise ValueError(f"{path}: {name} was announced with shape {shapes[name][1]} and got other rows")


def metadata_of(file: safe_open) -> dict[str, str]:
    return json.loads((file.metadata() or {}).get(METADATA, "{}"))


@contextmanager
def open_tensors(path: Path) -> Iterator[safe_open]:
    """Opens a safetensors file. Raises ConfigError if it is missing, truncated or of another format."""
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); rerun the step that writes it") from error
    with file:
        yield file


@contextmanager
def open_checked(path: Path, metadata: Mapping[str, str]) -> Iterator[safe_open]:
    """Like `open_tensors`, and also raises ConfigError if an entry of the file's metadata differs from `metadata`."""
    with open_tensors(path) as file:
        found = metadata_of(file)
        for key, wanted in metadata.items():
            if found.get(key) != wanted:
                raise ConfigError(
                    f"{path}: {key} is {found.get(key)!r}, expected {wanted!r}; give the file of this run, or repeat "
                    "the step that writes it"
                )
        yield file
