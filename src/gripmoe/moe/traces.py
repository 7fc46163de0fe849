"""Routing traces on disk, written pass by pass and read layer by layer, so that a trace need not fit in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from gripmoe.data.documents import Batch
from gripmoe.geometry.routing import LayerRouting, SelectionRule
from gripmoe.io.tensorfile import metadata_of, open_checked, open_tensors, tensor_file
from gripmoe.moe.model import MoEModel
from gripmoe.moe.recording import counted_tokens


def record_trace(path: Path, moe: MoEModel, batches: Sequence[Batch], metadata: Mapping[str, str]) -> int:
    """Writes the trace of `batches` (`MoEModel.trace`), with router inputs in the model's dtype, and the selection
    rules of the routers. Returns the number of tokens."""
    tokens = sum(int(counted_tokens(batch.attention_mask).sum()) for batch in batches)
    of_field = {
        "x_Nd": (moe.model.dtype, (tokens, moe.hidden_size)),
        "scores_NE": (torch.float32, (tokens, moe.num_experts)),
        "top_k_Nk": (torch.int16, (tokens, moe.top_k)),
    }
    shapes = {f"{layer}.{field}": shape for layer in moe.layers for field, shape in of_field.items()}
    rules = {
        layer: {name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(rule).items()}
        for layer, rule in moe.rules().items()
    }
    with tensor_file(path, shapes, {**metadata, "rules": json.dumps(rules)}) as put:
        for trace in moe.traced(batches):
            for layer, seen in trace.items():
                for field, value in vars(seen).items():
                    put(f"{layer}.{field}", value)
    return tokens if moe.layers else 0


class StoredTrace(Mapping[int, LayerRouting]):
    """A recorded trace by layer, on the CPU, with router inputs in fp32. Every access reads the layer from the file,
    because the whole trace may be larger than the model. Raises ConfigError if the file's metadata is not
    `metadata`."""

    def __init__(self, path: Path, metadata: Mapping[str, str]):
        self.path = path
        with open_checked(path, metadata) as file:
            self.corpus = metadata_of(file).get("corpus", "")  # the digest of its documents
            self._layers = sorted({int(name.split(".")[0]) for name in file.keys()})

    def __getitem__(self, layer: int) -> LayerRouting:
        if layer not in self._layers:
            raise KeyError(layer)
        with safe_open(self.path, framework="pt") as file:
            x_Nd, scores_NE, top_k_Nk = (file.get_tensor(f"{layer}.{f}") for f in ("x_Nd", "scores_NE", "top_k_Nk"))
        return LayerRouting(x_Nd.float(), scores_NE, top_k_Nk.long())

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def load_rules(path: Path) -> dict[int, SelectionRule]:
    """The selection rules of a recorded trace. Raises ConfigError if the file cannot be read."""
    with open_tensors(path) as file:
        rules = json.loads(metadata_of(file)["rules"])
    return {
        int(layer): SelectionRule(**{k: torch.tensor(v) if isinstance(v, list) else v for k, v in fields.items()})
        for layer, fields in rules.items()
    }
