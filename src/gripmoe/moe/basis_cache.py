"""The paper's hierarchical cache of retain bases (App. D): device, host, disk, the least recently used out first.

Bases of thousands of experts need not fit a GPU: every expert's lies in a file of its own, what is used often stays in
host memory, what is used now on the device.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import perf_counter

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.io.files import atomic_path
from gripmoe.moe.bases import StoredBases

Key = tuple[int, int]  # layer, expert


class BasisStore(Mapping[int, RetainBasis]):
    """Retain bases by layer, assembled from one basis per expert; what is not there is computed and kept.

    `compute(layer)` fits a whole layer; `metadata` says what the bases depend on (model, retain documents, thresholds).
    Files lie in a subfolder of `folder` named by its digest, so that others may share the folder. One that says
    otherwise all the same, or is truncated, corrupted or another expert's, is computed anew with a warning, never used.
    `hot_bytes` limits what is kept on `device`, `warm_bytes` what is kept on the host. `counts` holds hits per
    tier ("hot", "warm", "cold"), bases "missed" by all three, "computed" layers, and bytes read and written.
    """

    def __init__(
        self,
        folder: Path,
        layers: list[int],
        compute: Callable[[int], RetainBasis],
        metadata: Mapping[str, str],
        *,
        hot_bytes: float = float("inf"),
        warm_bytes: float = float("inf"),
        device: torch.device | str = "cpu",
    ):
        self.metadata = {key: str(value) for key, value in metadata.items()}
        digest = hashlib.sha256(json.dumps(sorted(self.metadata.items())).encode()).hexdigest()
        self.folder, self.layers, self.compute = folder / digest[:16], layers, compute
        self.device = torch.device(device)
        self.counts: Counter[str] = Counter()
        self._hot = _Tier(hot_bytes)
        self._warm = _Tier(warm_bytes)
        self._num_experts: dict[int, int] = {}

    @property
    def held_bytes(self) -> dict[str, int]:
        """What the tiers in memory hold now."""
        return {"hot": self._hot.used, "warm": self._warm.used}

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> RetainBasis:
        if layer not in self.layers:
            raise KeyError(layer)
        bases = [self.of((layer, 0))]  # which knows how many there are
        bases += [self.of((layer, expert)) for expert in range(1, self._num_experts[layer])]
        width = max(basis.shape[1] for basis in bases)
        padded = [torch.nn.functional.pad(basis, (0, width - basis.shape[1])) for basis in bases]
        return RetainBasis(torch.stack(padded))

    def of(self, key: Key) -> Tensor:
        """U_ret of one expert, (d, r), on the device."""
        if (basis := self._hot.get(key)) is not None:
            self.counts["hot"] += 1
            return basis
        if (basis := self._warm.get(key)) is not None:
            self.counts["warm"] += 1
        else:
            basis = self._read(key)
            if basis is None:
                self.counts["missed"] += 1
                basis = self._fit(*key)
            else:
                self.counts["cold"] += 1
            self._warm.put(key, basis)
        basis = basis.to(self.device)
        self._hot.put(key, basis)
        return basis

    def _identity(self, key: Key) -> dict[str, str]:
        """What the metadata of a basis must say for it to be used."""
        return {**self.metadata, "layer": str(key[0]), "expert": str(key[1])}

    def _file(self, key: Key) -> Path:
        return self.folder / f"{key[0]}.{key[1]}.safetensors"

    def _fit(self, layer: int, wanted: int) -> Tensor:
        """Computes and writes a layer, one file where all experts share one basis; returns that of the wanted one."""
        fitted = self.compute(layer)
        bases_Edr, ranks = fitted.U_ret_Edr.cpu(), fitted.ranks.tolist()
        self.counts["computed"] += 1
        for expert, (U_dr, rank) in enumerate(zip(bases_Edr, ranks, strict=True)):
            kept = U_dr[:, :rank].contiguous()
            metadata = {**self._identity((layer, expert)), "experts": str(len(ranks))}
            with atomic_path(self._file((layer, expert))) as temporary:
                save_file({"U_ret": kept}, temporary, metadata | {"checksum": _checksum(kept, metadata)})
            self.counts["bytes_written"] += kept.nbytes
        self._num_experts[layer] = len(ranks)
        return bases_Edr[wanted, :, : ranks[wanted]].clone(memory_format=torch.contiguous_format)  # not the whole layer

    def _read(self, key: Key) -> Tensor | None:
        file = self._file(key)
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="pt") as opened:
                found = opened.metadata() or {}
                basis = opened.get_tensor("U_ret")
        except (SafetensorError, OSError) as error:
            return self._distrust(file, f"cannot be read ({error})")
        checksum = found.pop("checksum", None)
        for name, wanted in self._identity(key).items():
            if found.get(name) != wanted:
                return self._distrust(file, f"{name} is {found.get(name)!r}, not {wanted!r}")
        if checksum != _checksum(basis, found) or "experts" not in found:
            return self._distrust(file, "its content does not match its checksum")
        self._num_experts[key[0]] = int(found["experts"])
        self.counts["bytes_read"] += basis.nbytes
        return basis

    def _distrust(self, file: Path, why: str) -> None:
        warnings.warn(f"{file}: {why}; its layer is fitted again", stacklevel=2)
        file.unlink(missing_ok=True)


class _Tier:
    """Tensors up to a number of bytes; the least recently used go first, and what is larger than that never stays."""

    def __init__(self, capacity: float):
        self.capacity, self.used = capacity, 0
        self._kept: OrderedDict[Key, Tensor] = OrderedDict()

    def get(self, key: Key) -> Tensor | None:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        return None

    def put(self, key: Key, tensor: Tensor) -> None:
        if key in self._kept:
            return
        self._kept[key] = tensor
        self.used += tensor.nbytes
        while self.used > self.capacity:
            _, dropped = self._kept.popitem(last=False)
            self.used -= dropped.nbytes


def _checksum(tensor: Tensor, metadata: Mapping[str, str]) -> str:
    """Of a tensor and of all that its file says about it."""
    digest = hashlib.sha256(json.dumps([sorted(metadata.items()), str(tensor.dtype), tensor.shape]).encode())
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


TIERS = ("hot", "warm", "cold")
HOT_BASES = 8  # the paper's example
MEASURED_STEPS = 20


def measure_tiers(file: Path) -> dict:
    """What the tiers hold and serve when every step asks for every expert of every layer, in the same order, for the
    bases in `file`.

    `limits`: by name of the limits, then by tier, its `limit` and what it has `held` (bytes), the `share` of accesses
    that it served and the `seconds` of one; None for no limit and for nothing served. Beside that the number of
    `bases`, their `mean_rank`, `hidden_size`, `bytes`, and `dense_bytes` as projectors; and the `steps` measured.
    """
    stored = StoredBases(file, {}).items()
    bases = {layer: RetainBasis(basis.U_ret_Edr.float()) for layer, basis in stored}  # as the file has them
    ranks_E = torch.cat([basis.ranks for basis in bases.values()]).sort().values
    some = next(iter(bases.values())).U_ret_Edr
    hidden, column = some.shape[1], some.shape[1] * some.element_size()  # bytes of one
    total, hot = (int(ranks.sum()) * column for ranks in (ranks_E, ranks_E[-HOT_BASES:]))
    limits = {
        "No limit": {},
        f"{HOT_BASES} bases hot, as in the paper, and all warm": {"hot": hot},
        f"{HOT_BASES} hot, half of all warm": {"hot": hot, "warm": total / 2},
    }
    return {
        "limits": {name: _served(bases, limit) for name, limit in limits.items()},
        "bases": len(ranks_E),
        "mean_rank": ranks_E.double().mean().item(),
        "hidden_size": hidden,
        "bytes": total,
        "dense_bytes": hidden * column * len(ranks_E),
        "steps": MEASURED_STEPS,
    }


def _served(bases: Mapping[int, RetainBasis], limits: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    keys = [(layer, expert) for layer, basis in bases.items() for expert in range(len(basis.U_ret_Edr))]
    seconds: Counter[str] = Counter()
    in_bytes = {f"{tier}_bytes": limit for tier, limit in limits.items()}
    with tempfile.TemporaryDirectory() as folder:
        store = BasisStore(Path(folder), list(bases), bases.__getitem__, {}, **in_bytes)
        for layer in store:  # the first access finds nothing
            store[layer]
        on_disk = store.counts["bytes_written"]
        store.counts.clear()
        for key in keys * MEASURED_STEPS:
            before, start = store.counts.copy(), perf_counter()
            store.of(key)
            took = perf_counter() - start
            seconds[next(tier for tier in TIERS if store.counts[tier] > before[tier])] += took
    held, accesses = {**store.held_bytes, "cold": on_disk}, sum(store.counts[tier] for tier in TIERS)
    return {
        tier: {
            "limit": limits.get(tier),
            "held": held[tier],
            "share": store.counts[tier] / accesses,
            "seconds": seconds[tier] / store.counts[tier] if store.counts[tier] else None,
        }
        for tier in TIERS
    }
