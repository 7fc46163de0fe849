"""Retain bases on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.io.tensorfile import open_checked, tensor_file


def save_bases(path: Path, bases: dict[int, RetainBasis], metadata: dict[str, str]) -> None:
    columns = {str(layer): basis.columns_Edr for layer, basis in bases.items()}
    shapes = {name: (U_Edr.dtype, tuple(U_Edr.shape)) for name, U_Edr in columns.items()}
    with tensor_file(path, shapes, metadata) as put:
        for name, U_Edr in columns.items():
            put(name, U_Edr)


class StoredBases(Mapping[int, RetainBasis]):
    """Saved bases by layer on `device`; on a CPU in fp64, as the projection needs them.

    The first layers stay on `device`, up to `memory` bytes. The next layers stay in host memory, up to `host_memory`
    bytes. The others are read from the file at each access. A training step needs every layer once and in order, so an
    LRU cache (App. D) would never hit. Raises ConfigError if the file's metadata is not `metadata`."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, str],
        device: torch.device | str = "cpu",
        memory: float = math.inf,
        host_memory: float = 0.0,
    ):
        self._path, self._device = path, device
        self._kept: dict[int, RetainBasis] = {}
        self._on_host: dict[int, Tensor] = {}
        with open_checked(path, metadata) as file:
            self._layers = sorted(map(int, file.keys()))
            for layer in self._layers:
                stored = file.get_tensor(str(layer))
                if not self._on_host and (basis := self._placed(stored)).columns_Edr.nbytes <= memory:
                    memory -= basis.columns_Edr.nbytes
                    self._kept[layer] = basis
                elif stored.nbytes <= host_memory:
                    host_memory -= stored.nbytes
                    self._on_host[layer] = stored.clone()  # a tensor that was read is mapped to the file
                else:
                    break

    @property
    def in_memory(self) -> bool:
        """Whether all layers stay on `device`."""
        return len(self._kept) == len(self._layers)

    def __getitem__(self, layer: int) -> RetainBasis:
        if layer in self._kept:
            return self._kept[layer]
        if layer not in self._layers:
            raise KeyError(layer)
        if layer in self._on_host:
            return self._placed(self._on_host[layer])
        with safe_open(self._path, framework="pt") as file:
            return self._placed(file.get_tensor(str(layer)))

    def _placed(self, stored: Tensor) -> RetainBasis:
        basis = stored.to(self._device)
        return RetainBasis(basis.double() if basis.device.type == "cpu" else basis)

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
