"""`gripmoe prepare-model`: an embedded model is trained, a published one is fetched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils.hub import cached_file, extract_commit_hash

from gripmoe.attacks.forcing import random_sets
from gripmoe.cli.common import identity_of
from gripmoe.cli.options import OutputFile, Settings
from gripmoe.config.models import EmbeddedModel, ModelConfig
from gripmoe.config.provenance import recorded
from gripmoe.config.reading import parse_settings
from gripmoe.evaluation.questions import accuracy, direct_answers
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_json
from gripmoe.io.locks import exclusive
from gripmoe.moe import MoEModel
from gripmoe.moe.families import is_moe
from gripmoe.moe.placement import visible_devices
from gripmoe.moe.storage import load_published, save_model
from gripmoe.training.checkpoint import claim_state, remove_state
from gripmoe.training.pretrain import train_base
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import all_texts, make_world
from gripmoe.worlds.models import make_model
from gripmoe.worlds.tokenizer import make_tokenizer


def prepare_model(
    *,
    settings: Settings,
    output: OutputFile,
    gpus: Annotated[int, typer.Option("--gpus", help="1: an embedded model trains on the GPU that is seen.")] = 0,
) -> None:
    """Train an embedded model, or fetch a published one.

    \b
    Example:
      gripmoe prepare-model --settings '{"source": "embedded", "family": "qwen3_moe", "seed": 0}' \\
          --output results/tiny/models/tiny_a/model.json

    \f
    Raises ConfigError if no attempt gives an embedded model that answers the questions it should.
    """
    config = parse_settings(ModelConfig, settings)
    folder = output.parent
    with exclusive(folder), recorded(folder / "provenance.json", prepare_model):
        if config.source == "published":
            model, tokenizer = load_published(config)
            read = cached_file(config.id, "config.json", revision=config.revision)
            commit = extract_commit_hash(read, None)  # of the hub; a local folder has none
            digest = save_model(model, tokenizer, folder / "weights")
            source = {"id": config.id, "revision": config.revision or "main", "commit": commit}
            write_json(output, {"weights": digest, **source})
            return
        _train_embedded(config, folder, output, visible_devices()[0] if gpus else torch.device("cpu"))


def _train_embedded(config: EmbeddedModel, folder: Path, output: Path, device: torch.device) -> None:
    """Trains from one seed after the other until a model is fit for use; a seed that failed is not tried again when
    the job is, unless settings or code have changed. Raises ConfigError, with every fault, if all attempts fail."""
    identity = identity_of(prepare_model, settings=config.model_dump(mode="json"))
    world = make_world(config.world_seed)
    tokenizer = make_tokenizer(all_texts(world))
    faults = []
    for seed in range(config.seed, config.seed + 1000 * config.attempts, 1000):
        failed = folder / f"failed_{seed}.json"
        if not failed.exists() or read_json(failed).get("identity") != identity:
            state_file = folder / f"state_{seed}.pt"
            claim_state(state_file, identity)
            model = make_model(config.family, len(tokenizer), seed=seed, **config.size.model_dump()).to(device)
            losses = train_base(
                model,
                tokenizer,
                world if config.trained_on == "everything" else world.without_forget(),
                max_early_steps=config.max_early_steps,
                late_steps=config.late_steps,
                learning_rate=config.learning_rate,
                seed=seed,
                state_file=state_file,
            )
            scores, fault = _base_scores(model, tokenizer, config)
            if not fault:
                digest = save_model(model, tokenizer, folder / "weights")
                write_json(output, {"weights": digest, "seed": seed, "final_loss": losses[-1], **scores})
                remove_state(state_file)
                return
            write_json(failed, {"fault": fault, **scores, "identity": identity})
            remove_state(state_file)
        faults.append(f"seed {seed}: {read_json(failed)['fault']}")
        print(f"not fit for use, {faults[-1]}", file=sys.stderr, flush=True)
    raise ConfigError(
        f"no base model to measure anything on. {'; '.join(faults)}. Give it more steps, more `attempts` or another "
        f"`seed` in models.yaml, and delete {folder}"
    )


def _base_scores(model, tokenizer, config) -> tuple[dict[str, float], str | None]:
    """Accuracy per domain, and what is left of it when the experts add nothing or are drawn at random; and what is
    wrong with it: a model that knows too little of what it was trained on, or knows it without its experts."""
    files = wmdp_files(make_world(config.world_seed), config.world_seed)
    questions = {domain: files[f"{domain}_questions"] for domain in ("forget", "retain")}

    def scores(suffix: str = "") -> dict[str, float]:
        return {
            f"{domain}_accuracy{suffix}": accuracy(direct_answers(model, tokenizer, rows))
            for domain, rows in questions.items()
        }

    measured = scores()
    for domain in ("forget", "retain") if config.trained_on == "everything" else ("retain",):
        if (known := measured[f"{domain}_accuracy"]) < config.required_accuracy:
            return measured, f"it answers {known:.3f} of the {domain} questions, below {config.required_accuracy}"
    if is_moe(model):
        moe = MoEModel(model)
        with moe.without_blocks():
            measured |= scores("_without_blocks")
        with moe.force_routing(random_sets(moe, seed=0)):
            measured |= scores("_random_experts")
        known, allowed = measured["forget_accuracy_without_blocks"], config.allowed_without_blocks
        if known > allowed:
            return measured, f"it answers {known:.3f} of the forget questions without any expert, above {allowed}"
    return measured, None
