"""Models and routing on disk: weights in the hub's layout, traces and bases as safetensors that say whose they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gripmoe import distributed
from gripmoe.catalogue import PublishedModel
from gripmoe.files import atomic_path
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import LayerRouting, RoutingTrace, SelectionRule
from gripmoe.moe.families import is_moe
from gripmoe.moe.model import MoEModel
from gripmoe.moe.placement import place, visible_devices
from gripmoe.moe.sharding import whole_state

ROUTERS = "routers.safetensors"
METADATA = "gripmoe"  # the entry of a safetensors header that says whose a trace or a basis is


def weights_digest(model: PreTrainedModel) -> str:
    """A checksum of every parameter and buffer, name by name."""
    return _digest(whole_state(model))


def _digest(state: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Writes a folder that plain transformers reloads, in place of what was there; returns the weights' digest. Of
    several processes that share the model the first does so. fp32 routers also get a file of their own: those beside
    bf16 weights are rounded by whoever loads the whole model in its one dtype, but not by `load_model`."""
    moe = MoEModel(model) if is_moe(model) else None  # its routers are in fp32 from here on
    state = whole_state(model)
    digest = _digest(state)  # before save_pretrained, which takes the state apart
    if distributed.is_first():
        with atomic_path(folder) as temporary:
            model.save_pretrained(temporary, state_dict=state)
            tokenizer.save_pretrained(temporary)
            if moe:
                routers = {name: p.detach().cpu().contiguous() for name, p in _router_parameters(moe).items()}
                save_file(routers, temporary / ROUTERS)
    return digest


def load_model(folder: Path, device: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer from a folder, in the dtype of the checkpoint, in eval mode. A tokenizer without a
    padding token (Mixtral's) pads with its end-of-text token, which no attention mask lets be seen.

    Its layers lie evenly on all GPUs that the process sees (`visible_devices`), unless `device` names another place."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    place(model, [device] if device else visible_devices())
    if stored := _stored_routers(folder):
        with torch.no_grad():
            for name, router in _router_parameters(MoEModel(model)).items():
                router.copy_(stored[name])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def load_routers(folder: Path, like: MoEModel) -> dict[int, torch.Tensor]:
    """Router weights, (E, d) in fp32 by layer, of the model that `save_model` left in `folder`, which has the
    architecture of `like`: nothing else of it is read. Raises ValueError if a router is not there."""
    stored = _stored_routers(folder)
    missing = [layer for layer in like.layers if f"{layer}.weight" not in stored]
    if missing:
        raise ValueError(f"{folder}: no routers of layers {missing}; it is another model than the one to correct")
    return {layer: stored[f"{layer}.weight"].to(like.model.device) for layer in like.layers}


def _stored_routers(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / ROUTERS
    return load_file(file) if file.exists() else {}


def _router_parameters(moe: MoEModel) -> dict[str, torch.nn.Parameter]:
    return {f"{layer}.{name}": p for layer in moe.layers for name, p in moe.router(layer).named_parameters()}


def load_published(config: PublishedModel) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint of the hub or a local folder. Raises ValueError, saying what to download, if it is neither."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.id, revision=config.revision)
        model = AutoModelForCausalLM.from_pretrained(config.id, revision=config.revision, dtype=config.dtype)
    except OSError as error:
        raise ValueError(
            f"model {config.id!r} (revision {config.revision or 'main'}) is neither a local folder nor reachable on "
            "the hub. On a machine with internet run `hf download` for it, and set `id:` in models.yaml to the folder."
        ) from error
    return model, tokenizer


def save_trace(
    path: Path,
    trace: RoutingTrace,
    rules: Mapping[int, SelectionRule],
    metadata: dict[str, str],
    dtype: torch.dtype = torch.float32,
) -> None:
    """A trace and the rules by which its sets were chosen. Router inputs are kept in `dtype`, that of the hidden states
    they were."""
    tensors = {}
    scalars = {}
    for layer, routing in trace.items():
        for name, value in vars(rules[layer]).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{layer}.rule.{name}"] = value.cpu()
            elif value is not None:
                scalars.setdefault(str(layer), {})[name] = value
        tensors[f"{layer}.x_Nd"] = routing.x_Nd.to(dtype).cpu()
        tensors[f"{layer}.scores_NE"] = routing.scores_NE.cpu()
        tensors[f"{layer}.top_k_Nk"] = routing.top_k_Nk.to(torch.int16).cpu()
    _save(path, tensors, {**metadata, "rules": json.dumps(scalars)})


def load_rules(path: Path) -> dict[int, SelectionRule]:
    """The rules that a saved trace's routers followed."""
    with safe_open(path, framework="pt") as file:
        scalars = json.loads(_metadata(file)["rules"])
        names = [name for name in file.keys() if ".rule." in name]
        for name in names:
            layer, _, field = name.split(".")
            scalars[layer][field] = file.get_tensor(name)
    return {int(layer): SelectionRule(**fields) for layer, fields in scalars.items()}


def load_trace(path: Path, metadata: dict[str, str]) -> RoutingTrace:
    """A saved trace, router inputs in fp32, on the CPU: it may be larger than the model. Raises ValueError if it was
    not recorded as `metadata` says."""
    tensors = _load(path, metadata)
    layers = sorted({int(name.split(".")[0]) for name in tensors})
    return {
        layer: LayerRouting(
            tensors[f"{layer}.x_Nd"].float(), tensors[f"{layer}.scores_NE"], tensors[f"{layer}.top_k_Nk"].long()
        )
        for layer in layers
    }


def save_bases(path: Path, bases: dict[int, RetainBasis], metadata: dict[str, str]) -> None:
    _save(path, {str(layer): basis.U_ret_Edr.cpu() for layer, basis in bases.items()}, metadata)


def load_bases(path: Path, metadata: dict[str, str], device: torch.device | str = "cpu") -> dict[int, RetainBasis]:
    """Saved bases on `device`. Raises ValueError if they were not fitted as `metadata` says."""
    return {int(layer): RetainBasis(U_ret_Edr.to(device)) for layer, U_ret_Edr in _load(path, metadata).items()}


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    one_entry = {METADATA: json.dumps(metadata)}  # several are written in any order: the same content, another file
    with atomic_path(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, one_entry)


def _metadata(file: safe_open) -> dict[str, str]:
    return json.loads((file.metadata() or {}).get(METADATA, "{}"))


def _load(path: Path, metadata: dict[str, str]) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        found = _metadata(file)
        for key, wanted in metadata.items():
            if found.get(key) != wanted:
                raise ValueError(f"{path}: {key} is {found.get(key)!r}, expected {wanted!r}; delete the file and rerun")
        return {name: file.get_tensor(name) for name in file.keys()}
