"""Routing on disk: recorded pass by pass and read layer by layer, so that neither needs memory for all of it."""

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
from gripmoe.moe.recording import routed_tokens


def record_trace(path: Path, moe: MoEModel, batches: Sequence[Batch], metadata: Mapping[str, str]) -> int:
    """Records what `MoEModel.trace` would return of `batches`, and the rules by which its sets were chosen; returns the
    number of tokens. Router inputs are kept in the dtype of the model, that of the hidden states they were."""
    tokens = sum(int(routed_tokens(batch.attention_mask).sum()) for batch in batches)
    rules, scalars = {}, {}
    for layer, rule in moe.rules().items():
        for name, value in vars(rule).items():
            if isinstance(value, Tensor):
                rules[f"{layer}.rule.{name}"] = value
            elif value is not None:
                scalars.setdefault(str(layer), {})[name] = value
    of_field = {
        "x_Nd": (moe.model.dtype, (tokens, moe.hidden_size)),
        "scores_NE": (torch.float32, (tokens, moe.num_experts)),
        "top_k_Nk": (torch.int16, (tokens, moe.top_k)),
    }
    shapes = {f"{layer}.{field}": shape for layer in moe.layers for field, shape in of_field.items()}
    shapes |= {name: (value.dtype, tuple(value.shape)) for name, value in rules.items()}
    with tensor_file(path, shapes, {**metadata, "rules": json.dumps(scalars)}) as put:
        for name, value in rules.items():
            put(name, value)
        for trace in moe.traced(batches):
            for layer, seen in trace.items():
                for field, value in vars(seen).items():
                    put(f"{layer}.{field}", value)
    return tokens if moe.layers else 0


class StoredTrace(Mapping[int, LayerRouting]):
    """A recorded trace; a layer, router inputs in fp32, is read from the file whenever it is asked for, to the CPU: all
    of them may be larger than the model. Raises ConfigError if it was not recorded as `metadata` says."""

    def __init__(self, path: Path, metadata: Mapping[str, str]):
        self.path = path
        with open_checked(path, metadata) as file:
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
    """The rules that a recorded trace's routers followed. Raises ConfigError if the file cannot be read."""
    with open_tensors(path) as file:
        scalars = json.loads(metadata_of(file)["rules"])
        names = [name for name in file.keys() if ".rule." in name]
        for name in names:
            layer, _, field = name.split(".")
            scalars[layer][field] = file.get_tensor(name)
    return {int(layer): SelectionRule(**fields) for layer, fields in scalars.items()}
