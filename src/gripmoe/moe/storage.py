"""Models and bases on disk: weights in the hub's layout, bases as safetensors that say whose they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers  # whose classes are imported when one of them is named
from safetensors.torch import save_file

from gripmoe.config.models import PublishedModel
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import aside, atomic_path
from gripmoe.io.tensorfile import open_tensors
from gripmoe.moe.families import is_moe
from gripmoe.moe.model import MoEModel
from gripmoe.moe.placement import place, visible_devices
from gripmoe.moe.sharding import whole_state

ROUTERS = "routers.safetensors"
OTHER_MODEL = "it is of another model; give the folder of the one that is meant, or save that again"


def weights_digest(model: transformers.PreTrainedModel) -> str:
    """A checksum of every parameter and buffer, name by name."""
    return _digest(whole_state(model))


def _digest(state: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_model(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase, folder: Path | str
) -> str:
    """Writes a folder that plain transformers reloads, in place of the model that was there; returns the digest of the
    weights (SHA-256). fp32 routers also get a file of their own: those beside bf16 weights are rounded by whoever loads
    the whole model in its one dtype, but not by `load_model`. In `model` itself they compute in fp32 from here on.

    `model` is the transformers model, below what accelerate wraps around it. Of several processes that share it every
    one calls this, and the first writes. Raises ValueError for experts of an unknown family; ConfigError, a ValueError,
    for a file, for a folder that holds other things than a model, or where the disk is full, and leaves what was there.
    (ours: the paper says nothing of storage.)"""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: this is a file; save to a folder of its own")
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
            if others := sorted(file.name for file in folder.glob("*") if not _of_a_model(file, temporary)):
                raise ConfigError(
                    f"{folder} holds {', '.join(others)}, which would be lost: save to a folder of its own"
                )
    return digest


def _of_a_model(file: Path, written: Path) -> bool:
    """Whether the model that is `written` now, or another, has a file of this name."""
    return (written / file.name).exists() or (file.is_file() and file.suffix in (".safetensors", ".json", ".jinja"))


def load_model(
    folder: Path | str, device: str | None = None, resident: int | None = None
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """A model and its tokenizer from a folder, in the dtype of the checkpoint, in eval mode; routers that `save_model`
    left there are in fp32. A tokenizer without a padding token (Mixtral's) pads with its end-of-text token, which no
    attention mask lets be seen.

    Its layers lie evenly on all GPUs that the process sees (`visible_devices`), unless `device` names another place;
    with `resident` the first so many, and the others in host memory. Raises ConfigError where a file is missing or cut
    off, and where the routers are of another model or not finite. (ours)"""
    folder = Path(folder)
    tokenizer, model = _read(folder)
    place(model, [device] if device else visible_devices(), resident)
    if (folder / ROUTERS).exists():
        moe = MoEModel(model)
        stored = _stored_routers(folder, moe)
        with torch.no_grad():
            for name, router in _router_parameters(moe).items():
                router.copy_(stored[name])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _read(folder: Path) -> tuple[transformers.PreTrainedTokenizerBase, transformers.PreTrainedModel]:
    if not (folder / "config.json").is_file():
        remedy = "give the folder that `save_model` has written"
        if aside(folder).exists():
            remedy = f"an interrupted save has left the model as {aside(folder)}; rename it to {folder.name}"
        raise ConfigError(f"{folder}: no model is here, config.json is missing; {remedy}")
    for file in folder.glob("*.safetensors"):
        with open_tensors(file):  # transformers does not say which of them is cut off
            pass
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no model can be read from here ({error}); save the model again") from error
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):  # transformers makes one up without files
        raise ConfigError(f"{folder}: the tokenizer is missing; save it there too, by `tokenizer.save_pretrained`")
    return tokenizer, model


def load_routers(folder: Path, like: MoEModel) -> dict[int, torch.Tensor]:
    """Router weights, (E, d) in fp32 by layer, of the model that `save_model` left in `folder`, which has the
    architecture of `like`: nothing else of it is read. Raises ConfigError if they are of another model."""
    stored = _stored_routers(folder, like)
    return {layer: stored[f"{layer}.weight"].to(like.model.device) for layer in like.layers}


def _stored_routers(folder: Path, moe: MoEModel) -> dict[str, torch.Tensor]:
    file, expected, stored = folder / ROUTERS, _router_parameters(moe), {}
    if file.exists():
        with open_tensors(file) as opened:
            stored = {name: opened.get_tensor(name) for name in opened.keys()}
    if missing := sorted({int(name.split(".")[0]) for name in expected.keys() - stored.keys()}):
        raise ConfigError(f"{file}: no routers of layers {missing}: {OTHER_MODEL}")
    for name, router in stored.items():
        if name not in expected:
            raise ConfigError(f"{file}: {name}: the model has no such router: {OTHER_MODEL}")
        if router.shape != expected[name].shape:
            shapes = f"{tuple(router.shape)}, not {tuple(expected[name].shape)}"
            raise ConfigError(f"{file}: {name}: has shape {shapes}: {OTHER_MODEL}")
        if not router.isfinite().all():
            raise ConfigError(f"{file}: {name}: holds NaN or infinity; save the model again")
    return stored


def _router_parameters(moe: MoEModel) -> dict[str, torch.Tensor]:
    return {f"{layer}.{name}": p for layer in moe.layers for name, p in moe.router(layer).state_dict().items()}


def load_published(config: PublishedModel) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """A checkpoint of the hub or a local folder. Raises ConfigError, saying what to download, if it is neither."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.id, revision=config.revision)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            config.id, revision=config.revision, dtype=config.dtype
        )
    except OSError as error:
        raise ConfigError(
            f"model {config.id!r} (revision {config.revision or 'main'}) is neither a local folder nor reachable on "
            f"the hub. Check its `id:` and `revision:` in models.yaml; on a machine with internet run `hf download "
            f"{config.id} --revision {config.revision or 'main'}`, and set `id:` to the folder that it names."
        ) from error
    return model, tokenizer
