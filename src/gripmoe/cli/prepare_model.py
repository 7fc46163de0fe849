"""`gripmoe prepare-model`: train an embedded model, copy it from the package, or download a published one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils.hub import cached_file, extract_commit_hash

from gripmoe.cli.common import identity_of
from gripmoe.cli.options import BaseFile, OutputFile, Settings
from gripmoe.config.models import ModelConfig, PublishedModel
from gripmoe.config.provenance import provenance_of, recorded
from gripmoe.config.reading import parse_settings
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_json
from gripmoe.io.locks import exclusive
from gripmoe.moe.placement import visible_devices
from gripmoe.moe.storage import load_published, save_model
from gripmoe.training.base_model import make_base_model
from gripmoe.worlds.shipped import load_shipped


def prepare_model(
    *,
    settings: Settings,
    output: OutputFile,
    base: BaseFile = None,
    gpus: Annotated[int, typer.Option("--gpus", help="1: an embedded model trains on the GPU that is seen.")] = 0,
) -> None:
    """Train an embedded model, or download a published one.

    \b
    Example:
      gripmoe prepare-model --output skills/model.json \\
          --settings '{"source": "embedded", "family": "qwen3_moe", "seed": 0, "trained_on": "skills"}'
    """
    config = parse_settings(ModelConfig, settings)
    folder = output.parent
    if config.source == "published":
        return download(config, output)
    with exclusive(folder), recorded(provenance_of(output), prepare_model):
        if config.shipped:
            model, tokenizer, card = load_shipped(config.shipped)
            for key in ("seed", "family", "trained_on"):
                if card[key] != (asked := getattr(config, key)):
                    of = f"the package's {config.shipped!r} has `{key}: {card[key]}`, not {asked}"
                    raise ConfigError(f"models.yaml: shipped: {of}; leave `shipped` out")
            del card["family"], card["trained_on"]
            write_json(output, {**card, "weights": save_model(model, tokenizer, folder / "weights")})
            return
        device = visible_devices()[0] if gpus else torch.device("cpu")
        if config.base and not base:
            raise ConfigError(
                f"--base is required: model.json of {config.base!r}, whose experts are to learn the facts"
            )
        identity = identity_of(prepare_model, base, settings=config.model_dump(mode="json"))
        make_base_model(config, output, device, identity, base and base.parent / "weights")


def download(config: PublishedModel, output: Path) -> None:
    """Downloads a published model and saves it. This code alone decides whether it is prepared again."""
    with recorded(provenance_of(output), download):
        model, tokenizer = load_published(config, original=True)  # of one that is refused no folder is left
        with exclusive(output.parent):
            read = cached_file(config.id, "config.json", revision=config.revision)
            commit = extract_commit_hash(read, None)  # of the hub; a local folder has none
            digest = save_model(model, tokenizer, output.parent / "weights")
            source = {"id": config.id, "revision": config.revision or "main", "commit": commit}
            write_json(output, {"weights": digest, **source})
