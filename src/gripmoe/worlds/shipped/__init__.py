"""The base model `tiny_a` and its retrained model as package data: the same weights on every machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers  # its classes are imported on first use

from gripmoe.io.errors import ConfigError

FOLDER = Path(__file__).parent


def shipped_models() -> list[str]:
    return sorted(card.parent.name for card in FOLDER.glob("*/card.json"))


def load_shipped(
    name: str,
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase, dict[str, Any]]:
    """A model of the package in fp32 (its file is in bf16), its tokenizer, and its card: how it was made, scores,
    digest of the weights. Raises ConfigError for a name that is not in `shipped_models`."""
    if name not in (known := shipped_models()):
        raise ConfigError(f"the package has no model {name!r}; it has {', '.join(known)}")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32)
    card = json.loads((FOLDER / name / "card.json").read_text(encoding="utf-8"))
    return model.eval(), transformers.AutoTokenizer.from_pretrained(FOLDER / name), card


def tiny_model(
    name: str = "tiny_a",
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """The embedded base model (ours), 1.8 million parameters in fp32, and its tokenizer: for examples and tests on a
    CPU. `tiny_a_retrained` never saw the forget data. Raises ConfigError for another name."""
    return load_shipped(name)[:2]
