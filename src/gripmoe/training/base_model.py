"""Base models of the embedded world: seed after seed, until one knows its facts and keeps them in experts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gripmoe.config.models import EmbeddedModel
from gripmoe.evaluation.questions import accuracy, direct_answers
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_json
from gripmoe.moe import MoEModel
from gripmoe.moe.families import is_moe
from gripmoe.moe.random_routing import random_sets
from gripmoe.moe.storage import save_model
from gripmoe.training.checkpoint import claim_state, remove_state
from gripmoe.training.pretrain import train_base
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import all_texts, make_world
from gripmoe.worlds.models import make_model
from gripmoe.worlds.tokenizer import make_tokenizer


def make_base_model(config: EmbeddedModel, output: Path, device: torch.device, identity: Mapping[str, Any]) -> None:
    """Trains from one seed after the other until a model is fit for use, saves it beside `output` and writes its
    seed and scores there. A seed that failed is not tried again when the job is, unless `identity`, of settings and
    code, has changed. Raises ConfigError, with every fault, if all attempts fail."""
    folder = output.parent
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
            scores, fault = base_scores(model, tokenizer, config)
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


def base_scores(model, tokenizer, config: EmbeddedModel) -> tuple[dict[str, float], str | None]:
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
