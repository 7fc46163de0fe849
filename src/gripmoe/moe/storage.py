"""Models on disk: weights in the hub's layout, and routers in fp32 beside them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers  # its classes are imported on first use
from safetensors import SafetensorError
from safetensors.torch import save_file

from gripmoe.config.models import PublishedModel
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import aside, atomic_path
from gripmoe.io.tensorfile import open_tensors
from gripmoe.moe.adapters import holds_adapters, unwrapped
from gripmoe.moe.families import DENSE, FAMILIES, has_experts, is_moe
from gripmoe.moe.model import MoEModel
from gripmoe.moe.placement import place, visible_devices
from gripmoe.moe.sharding import is_sharded, whole_state

ROUTERS = "routers.safetensors"
MODEL_FILES = {  # what transformers and this module write for a model and its tokenizer
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", ROUTERS),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
}
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def weights_digest(model: transformers.PreTrainedModel) -> str:
    """A checksum of every entry of the state dict, name by name."""
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
    """Writes a model to a folder that plain transformers can load, and replaces a model there (ours). Returns the
    SHA-256 digest of the weights.

    Routers are also written in fp32 to a separate file, which `load_model` reads; plain transformers rounds them to the
    dtype of a bf16 model. `model` itself is unchanged. It is the transformers model without a wrapper, of accelerate or
    torch.compile. Of a model that several processes share (`shard_experts`), every process calls this:
    the first writes, and the others wait for it and return the same digest.

    Raises ValueError for experts of an unknown family, for adapters that are not merged, and without a tokenizer.
    Raises ConfigError, a ValueError, if `folder` is a file, a mount, the current folder, or holds other things than a
    model, or if the disk is full; the old content stays."""
    if not isinstance(model, torch.nn.Module) or unwrapped(model) is not model or holds_adapters(model):
        raise ValueError(
            f"`model` is a {type(model).__name__}: give the transformers model (of PEFT, `model.merge_and_unload()`; "
            "of torch.compile, `model._orig_mod`)"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise ValueError(f"`tokenizer` is {tokenizer!r}: give the tokenizer of the model, which is saved beside it")
    folder = Path(folder).resolve()  # "." has no name to write beside, and a link stays a link
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: this is a file; save to a folder of its own")
    if folder.is_mount() or (folder.is_dir() and folder.samefile(".")):
        raise ConfigError(
            f"{folder}: a save replaces its folder, and this is a mount or the current one; name one in it"
        )
    moe = MoEModel(model) if is_moe(model) else None
    try:
        state = whole_state(model)
        digest = _digest(state)  # before save_pretrained, which changes the state
        if distributed.is_first():
            _write(model, state, moe, tokenizer, folder)
    finally:
        if moe:
            moe.release(to_own_dtype=True)
    return distributed.text_of_first(digest) if is_sharded(model) else digest


def _write(
    model: transformers.PreTrainedModel,
    state: Mapping[str, torch.Tensor],
    moe: MoEModel | None,
    tokenizer: transformers.PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    with atomic_path(folder) as temporary:
        model.save_pretrained(temporary, state_dict=state)
        tokenizer.save_pretrained(temporary)
        if moe:
            routers = {name: p.detach().cpu().contiguous() for name, p in _router_parameters(moe).items()}
            save_file(routers, temporary / ROUTERS)
        for file in temporary.glob("*.safetensors"):  # safetensors lets only their owner read them
            file.chmod((temporary / "config.json").stat().st_mode)
        others = [file.name for file in folder.glob("*") if not _of_a_model(file, temporary)]
        if others:
            names = ", ".join(sorted(others))
            raise ConfigError(f"{folder} holds {names}, which would be lost: save to a folder of its own")


def _of_a_model(file: Path, written: Path) -> bool:
    known = file.name in MODEL_FILES or bool(SHARD.fullmatch(file.name))
    return (written / file.name).exists() or (file.is_file() and known)


def load_model(
    folder: Path | str,
    device: str | None = None,
    *,
    tokenizer: transformers.PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Loads a model in eval mode, in the dtype of its checkpoint, and its tokenizer from a folder (ours). Routers that
    `save_model` has written are in fp32. A tokenizer without a padding token (Mixtral's) pads with its end-of-text
    token, which the attention mask hides. Of a folder without a tokenizer, give the model's `tokenizer`.

    The layers are spread evenly over all GPUs that the process sees (`visible_devices`), or placed on `device`. Raises
    ConfigError for a file that is missing or truncated, and for routers that belong to other weights or are not
    finite."""
    folder = Path(folder)
    tokenizer, model = _read(folder, tokenizer, trust_remote_code)
    place(model, [device] if device else visible_devices())
    if (folder / ROUTERS).exists():
        moe = MoEModel(model)
        stored = _stored_routers(folder, moe)
        with torch.no_grad():
            for name, router in _router_parameters(moe).items():
                exact = stored[name].to(router)
                if not torch.equal(exact.to(model.dtype), router.to(model.dtype)):  # as plain transformers rounds
                    raise ConfigError(
                        f"{folder / ROUTERS}: {name}: the other files of the folder have another router: they were "
                        "saved later, by plain `save_pretrained`; save the model again by `gripmoe.save_model`, or "
                        f"delete {ROUTERS}, and its routers are read as plain transformers reads them"
                    )
                router.copy_(exact)
    return model, with_pad_token(tokenizer)


def with_pad_token(tokenizer: transformers.PreTrainedTokenizerBase) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer, which pads by the token that ends texts, or by its first, if it has no token for padding."""
    if tokenizer.pad_token is None:  # as Mixtral's
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _read(
    folder: Path, tokenizer: transformers.PreTrainedTokenizerBase | None, remote: bool
) -> tuple[transformers.PreTrainedTokenizerBase, transformers.PreTrainedModel]:
    if not (folder / "config.json").is_file():
        remedy = "give the folder that `save_model` has written"
        if aside(folder).exists():
            remedy = f"an interrupted save has left the model as {aside(folder)}; rename it to {folder.name}"
        raise ConfigError(f"{folder}: no model is here, config.json is missing; {remedy}")
    for file in folder.glob("*.safetensors"):
        with open_tensors(file):  # transformers does not name the truncated file
            pass
    try:
        tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", trust_remote_code=remote, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:  # the last, of shapes other than those of config.json
        raise ConfigError(f"{folder}: no model can be read from here ({error}); save the model again") from error
    _require_whole(loaded, f"{folder}", "save the model again")
    _require_words(tokenizer, f"{folder}", "save it there too, by `tokenizer.save_pretrained`")
    return tokenizer, model.eval()


def _require_words(tokenizer: transformers.PreTrainedTokenizerBase, where: str, remedy: str) -> None:
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):  # what transformers makes without files
        raise ConfigError(f"{where}: the tokenizer is missing; {remedy}")


def _require_whole(loaded: dict, where: str, remedy: str) -> None:
    if missing := sorted(loaded["missing_keys"]):  # transformers initialises them at random
        lacking = missing[0] + (f" and {len(missing) - 1} others" if missing[1:] else "")
        raise ConfigError(f"{where}: the weights lack {lacking}; {remedy}")


def load_routers(folder: Path, like: MoEModel) -> tuple[dict[int, torch.Tensor], dict[int, dict[str, torch.Tensor]]]:
    """Loads only the routers that `save_model` has written to `folder`: weights by layer, (E, d) in fp32, and biases as
    `MoEModel.router_biases` gives them. Raises ConfigError if they do not fit the architecture of `like`."""
    stored = _stored_routers(folder, like)
    thetas = {layer: stored[f"{layer}.weight"].to(like.model.device) for layer in like.layers}
    biases = {layer: {name: stored[f"{layer}.{name}"] for name in own} for layer, own in like.router_biases().items()}
    return thetas, biases


def _stored_routers(folder: Path, moe: MoEModel) -> dict[str, torch.Tensor]:
    file, expected, stored = folder / ROUTERS, _router_parameters(moe), {}
    if file.exists():
        with open_tensors(file) as opened:
            stored = {name: opened.get_tensor(name) for name in opened.keys()}
    elif expected:
        raise ConfigError(f"{file} is missing; save the model with `gripmoe.save_model`")
    for name in sorted(expected.keys() | stored.keys()):
        shape, found = (tuple(each[name].shape) if name in each else None for each in (expected, stored))
        if shape != found:
            raise ConfigError(
                f"{file}: {name}: the file has {found or 'no such router'}, the model {shape or 'no such router'}: "
                "it is of another model; give the folder of the one that is meant, or save that again"
            )
        if not stored[name].isfinite().all():
            raise ConfigError(f"{file}: {name}: holds NaN or infinity; save the model again")
    return stored


def _router_parameters(moe: MoEModel) -> dict[str, torch.Tensor]:
    return {f"{layer}.{name}": p for layer in moe.layers for name, p in moe.router(layer).state_dict().items()}


def load_published(
    config: PublishedModel, *, original: bool = False
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Loads a checkpoint from the hub or a local folder. A tokenizer without a padding token pads as in `load_model`.
    Raises ConfigError, with the download command, if there is neither, and for a checkpoint that is not whole or has no
    tokenizer. With `original`, for a model that is to be unlearned, raises ConfigError also for an unknown family and a
    padding token without an embedding, both before weights are read, and for routers that are not finite."""
    where = f"model {config.id!r} (revision {config.revision or 'main'})"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.id, revision=config.revision)
        _require_words(tokenizer, where, "download it again, with its tokenizer")
        tokenizer = with_pad_token(tokenizer)
        if original:
            _require_known(config, tokenizer, where)
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            config.id, revision=config.revision, dtype=config.dtype, output_loading_info=True
        )
    except ConfigError:
        raise
    except (SafetensorError, ValueError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and not Path(config.id).is_dir():
            raise ConfigError(
                f"{where} is neither a local folder nor reachable on the hub. Check its `id:` and `revision:` in "
                f"models.yaml; on a machine with internet run `hf download {config.id} --revision "
                f"{config.revision or 'main'}`, and set `id:` to the folder that it names."
            ) from error
        why = str(error).split("\n")[0]
        raise ConfigError(f"{where} cannot be read ({why}); download it again") from error
    _require_whole(loaded, where, "download it again")
    if original:
        _require_finite_routers(model, where)
    return model, tokenizer


def _require_known(config: PublishedModel, tokenizer: transformers.PreTrainedTokenizerBase, where: str) -> None:
    """Raises ConfigError for a model that no later step can use, from its configuration and tokenizer alone."""
    described = transformers.AutoConfig.from_pretrained(config.id, revision=config.revision)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(described)
    family = model.config.model_type
    if family not in FAMILIES and not has_experts(model.config):
        dense = ", ".join(name for name, each in FAMILIES.items() if each is DENSE)
        raise ConfigError(
            f"{where}: gripmoe does not know the family {family!r}, and of dense families only {dense}; set `id:` in "
            "models.yaml to a model of a family that it knows"
        )
    try:
        MoEModel(model)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.pad_token_id >= rows:
        raise ConfigError(
            f"{where}: the tokenizer pads with {tokenizer.pad_token!r}, whose id is {tokenizer.pad_token_id}, and the "
            f"model has embeddings of ids below {rows}; set another `pad_token` in its tokenizer_config.json"
        )


def _require_finite_routers(model: transformers.PreTrainedModel, where: str) -> None:
    moe = MoEModel(model)
    try:
        for name, router in _router_parameters(moe).items():
            if not router.isfinite().all():
                raise ConfigError(f"{where}: the router {name} holds NaN or infinity; download it again")
    finally:
        moe.release(to_own_dtype=True)
