"""The models of an audit: located, compared, and checked against memory before they are loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from tqdm import tqdm

from gripmoe.config.training import Relearning
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json
from gripmoe.moe import MoEModel
from gripmoe.moe.families import NUMBERS_OF_EXPERTS, family_of
from gripmoe.moe.storage import load_model, with_pad_token
from gripmoe.planning.cost import GB

ADAPTER = "adapter_config.json"
DESCRIPTIONS = ["*.json", "*.jinja", "*.txt", "tokenizer*", "*.model"]  # files of a repository without its weights
COPIES = ["original/*", "consolidated*", "*.pth", "*.gguf"]  # of the weights, in other formats
STATES = {"adamw": 2.0, "adamw_8bit": 1.0}  # of an optimizer, per byte of weights; adamw_fp32: 12 bytes a weight
NAMED = {  # by the name in an error message: the keys of config.json that may hold it
    "family": ("model_type",),
    "layers": ("num_hidden_layers",),
    "experts": NUMBERS_OF_EXPERTS,
    "experts per token": ("num_experts_per_tok", "moe_topk"),
    "hidden size": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "normalisation of router weights": ("norm_topk_prob",),
    "scale of router weights": ("routed_scaling_factor",),
    "positions": ("rope_parameters",),
    "epsilon of norms": ("rms_norm_eps",),
    "activation": ("hidden_act",),
}


@dataclass(frozen=True)
class Located:
    """A model that is not loaded yet: what its user calls it, its folder, its adapter if it has one, and its
    configuration."""

    flag: str
    name: str
    folder: Path
    adapter: Path | None
    config: transformers.PretrainedConfig
    shapes: dict[str, tuple[int, ...]]
    remote: bool = False  # whether code in its folder is run

    @property
    def dtype(self) -> torch.dtype:
        return self.config.dtype or torch.float32

    @property
    def size(self) -> float:
        """Bytes of all parameters."""
        return self.dtype.itemsize * sum(torch.Size(shape).numel() for shape in self.shapes.values())


def find(name: str | Path, flag: str, *, original: Located | None = None, trust_remote_code: bool = False) -> Located:
    """Locates a model in a local folder, or downloads the configuration of a hub model ("owner/name" or
    "owner/name@revision") without its weights. A PEFT adapter needs `original` as its base. Warns of an adapter that
    names another base. Raises ConfigError, naming `flag` and the remedy."""
    folder = _folder(name, flag, DESCRIPTIONS)
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        if original is None:
            raise ConfigError(f"{flag} {name}: this is an adapter; give the model that it adapts")
        _warn_of_another_base(folder, flag, original)
        return Located(flag, str(name), original.folder, folder, original.config, original.shapes, original.remote)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{flag} {name}: no model is here, config.json is missing; give the folder that holds it")
    content = read_json(folder / "config.json")
    # Code in the folder of a family that transformers has too is not run.
    remote = "auto_map" in content and content.get("model_type") not in transformers.CONFIG_MAPPING
    if remote and not trust_remote_code:
        raise ConfigError(
            f"{flag} {name}: config.json names code of its own (auto_map), which would run on this machine; read the "
            "code, and give it to `gripmoe audit --trust-remote-code`"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=remote)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=remote)
    except Exception as error:  # whatever transformers raises for values that it does not check
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise ConfigError(f"{flag} {name}: config.json describes no model that transformers knows ({reason})") from None
    family_of(model)  # raises for one that is unknown, before weights are read
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return Located(flag, str(name), folder, None, config, shapes, remote)


def _warn_of_another_base(adapter: Path, flag: str, original: Located) -> None:
    """Warns if an adapter was trained on a model of another name: it may fit in shapes alone."""
    trained_on = str(read_json(adapter / ADAPTER).get("base_model_name_or_path") or "")
    if trained_on and _last_name(trained_on) != _last_name(original.name):
        tqdm.write(
            f"warning: {flag} {adapter}: the adapter was trained on {trained_on}, and is merged into "
            f"{original.flag} {original.name}; give that model, unless they are the same"
        )


def _last_name(model: str) -> str:
    """Of a hub id or a folder, as `name` of `owner/name@revision`."""
    return Path(model.partition("@")[0]).name


def find_all(names: Mapping[str, str | Path], trust_remote_code: bool = False) -> dict[str, Located]:
    """Locates the models "original", "unlearned" and perhaps "retrained". Raises ConfigError as `find` and `compare`
    do."""
    found: dict[str, Located] = {}
    for name, given in names.items():
        found[name] = find(given, f"--{name}", original=found.get("original"), trust_remote_code=trust_remote_code)
        compare(found["original"], found[name])
    return found


def _folder(name: str | Path, flag: str, patterns: list[str] | None) -> Path:
    if Path(name).is_dir():
        return Path(name)
    repository, _, revision = str(name).partition("@")
    try:
        wanted = dict(revision=revision or None, allow_patterns=patterns, ignore_patterns=COPIES)
        return Path(snapshot_download(repository, **wanted))
    except (OSError, HFValidationError, ValueError) as error:
        is_path = str(name).startswith((".", "/", "~")) or str(name).count("/") != 1
        reason = str(error).strip().split("\n")[0]
        remedy = f", or run `hf download {repository}` where there is internet and give the folder that it names"
        raise ConfigError(
            f"{flag} {name}: neither a folder nor a model that the hub gives this machine; correct it"
            + f"{remedy} ({reason})" * (not is_path)
        ) from None


def computing(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """What a configuration says of NAMED, by name."""
    text = config.get_text_config()
    return {
        what: next((getattr(text, key) for key in keys if hasattr(text, key)), None) for what, keys in NAMED.items()
    }


def compare(one: Located, other: Located) -> None:
    """Raises ConfigError, naming the difference, if two models differ in more than weights."""
    named = None not in (one.config.dtype, other.config.dtype)  # otherwise the weights say it, once they are loaded
    both = (described(each.config, each.shapes, each.dtype if named else None) for each in (one, other))
    compare_described(*both, f"{one.flag} and {other.flag}")


def compare_described(one: Mapping[str, Any], other: Mapping[str, Any], pair: str) -> None:
    for what in [*one, *other]:
        values = [each.get(what, "absent") for each in (one, other)]
        if values[0] != values[1]:
            remedy = "give a model and what became of it"
            if what == "dtype":
                remedy = "save both in one (the workflow reads a published model in the `dtype` of models.yaml)"
            raise ConfigError(f"{pair} differ in {what}: {values[0]} and {values[1]}; {remedy}")


def described(
    config: transformers.PretrainedConfig, shapes: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Any]:
    """All but the weights of a model, by the names that errors use."""
    return {**computing(config), **shapes} | ({"dtype": str(dtype).removeprefix("torch.")} if dtype else {})


def check_vocabulary(model, tokenizer, name: str) -> None:
    """Raises ConfigError if the tokenizer gives tokens that the model does not know."""
    highest, rows = max(tokenizer.get_vocab().values()), model.get_input_embeddings().weight.shape[0]
    if highest >= rows:
        raise ConfigError(
            f"{name}: the tokenizer gives ids up to {highest}, and the model has {rows} embeddings; give the tokenizer "
            "that belongs to the model"
        )


def check_finite(model: torch.nn.Module, name: str) -> None:
    """Raises ConfigError for weights that hold NaN or infinity: such a model answers nothing, as if it had
    forgotten."""
    for key, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ConfigError(f"{name}: {key} holds NaN or infinity; save a model from before it diverged")


def tokenizer_digest(tokenizer) -> str:
    """A checksum of what a tokenizer makes of texts: its own description, or its words if it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    told = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = json.dumps([tokenizer.all_special_tokens, tokenizer("a")["input_ids"]])
    return hashlib.sha256((told + special).encode()).hexdigest()


def compare_tokenizers(one, other, pair: str) -> None:
    """Raises ConfigError if two tokenizers do not give every text the same tokens, as far as their words say."""
    words = one.get_vocab(), other.get_vocab()
    for word in [*words[0], *words[1]]:
        if words[0].get(word) != words[1].get(word):
            ids = [vocabulary.get(word, "absent") for vocabulary in words]
            raise ConfigError(
                f"{pair} differ in their tokenizers: {word!r} is {ids[0]} and {ids[1]}; save one with both"
            )
    text = "A question of 12 words:\n\nIs this it?"
    if one(text)["input_ids"] != other(text)["input_ids"]:
        raise ConfigError(f"{pair} differ in their tokenizers, which split a text otherwise; save one with both")


def needed(found: Located, relearning: Relearning | None, models: int) -> tuple[float, float]:
    """Bytes on the devices and in host memory. The devices hold two models side by side, or weights, gradients and
    states in finetuning. Host memory holds the other models, and the weights that finetuning starts from."""
    states = STATES.get(relearning.optimizer, 12 / found.dtype.itemsize) if relearning else 0.0
    return found.size * (2 + states), found.size * models


def check_memory(found: Located, relearning: Relearning | None, models: int) -> str:
    """A line with the memory that the models need and the machine has. Raises ConfigError if the models do not fit."""
    devices, host = needed(found, relearning, models)
    memory = host_memory()
    places = [("this machine", devices + host, memory)]
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
        places = [(f"{len(cards)} GPU{'s' * (len(cards) > 1)}", devices, sum(cards)), ("this machine", host, memory)]
    parts = [f"{_size(need)} of {_size(there)} of {name}" for name, need, there in places]
    line = f"{models} models of {_size(found.size)} take {' and '.join(parts)}"
    if any(need > there for _, need, there in places):
        fits = relearning and sum(needed(found, None, models)) <= sum(there for *_, there in places)
        remedy = "choose --attacks without relearning" if fits else "take a larger machine, or more GPUs"
        raise ConfigError(f"{found.flag}: too large: {line}; {remedy}")
    return line


def host_memory(group: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may use: of the machine, or of the job or container (cgroup v2) if that has less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    own = group.read_text(encoding="utf-8").rpartition("0::/")[2].strip() if group.exists() else ""
    for folder in [groups / own, *(groups / own).parents]:
        limit = folder / "memory.max"
        if limit.is_file() and (text := limit.read_text(encoding="utf-8").strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def _size(count: float) -> str:
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{1000 * count / GB:.1f} MB"


def load(found: Located, device: str | None = None, tokenizer=None):
    """The model with its adapter merged, and its tokenizer, or `tokenizer` if it is saved without one. Raises
    ConfigError for missing or truncated weights."""
    whole = _folder(found.name, found.flag, None)  # with weights
    folder, adapter = (found.folder, whole) if found.adapter else (whole, None)
    if any(folder.glob("tokenizer*")):
        tokenizer = None
    elif tokenizer is not None:
        tqdm.write(f"{found.flag} {found.name}: the folder has no tokenizer; that of the original model is used")
    model, tokenizer = load_model(folder, device, tokenizer=tokenizer, trust_remote_code=found.remote)
    if adapter:
        from peft import PeftModel

        MoEModel(model)  # routers in fp32, or those of the adapter would be rounded
        try:
            model = PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(f"{found.flag} {adapter}: the adapter does not fit {folder} ({reason})") from None
        if (adapter / "tokenizer_config.json").is_file():
            tokenizer = with_pad_token(transformers.AutoTokenizer.from_pretrained(adapter))
    return model, tokenizer
