"""Measures which parameters of an embedded base model hold its facts.

    python workflow/where_facts_live.py --world record --results results/tiny --output docs/record/where_facts_live.csv

Parameters are replaced by random ones. Then the replaced experts and routers train on the base model's own documents
without the forget facts; all other parameters are frozen. If forget accuracy returns, experts and routers did not hold
the forget facts: no document of this training states one. `snakemake` makes the base models of the world.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import trange
from transformers import PreTrainedModel

from gripmoe.config.grid import Project
from gripmoe.config.models import EmbeddedModel
from gripmoe.data.documents import collate, encode, length_buckets
from gripmoe.evaluation.questions import accuracy, direct_answers
from gripmoe.io.files import write_csv
from gripmoe.moe.storage import load_model
from gripmoe.training.pretrain import TOKENS_PER_FORWARD, _loss
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import LATE_MIX, World, make_world, training_batch
from gripmoe.worlds.facts import FORGET_SUBJECT
from gripmoe.worlds.models import make_model

CHECKS = (40, 80, 160)  # steps; base training takes about 2,000
OTHER_SEED = 777_000  # added to a base model's own: the random parameters are none that it started from


def blocks_of(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """All parameters of experts and routers."""
    return [parameter for layer in model.model.layers for parameter in layer.mlp.parameters()]


@torch.no_grad()
def forget_words(model: PreTrainedModel, tokenizer, world: World, fresh: PreTrainedModel) -> None:
    """Replaces the embeddings of the words that only answers to forget questions use."""
    values = world.facts.values.items()
    words = {word for (subject, _), pool in values if subject == FORGET_SUBJECT for word in pool}
    ids = [token for word in sorted(words) for token in tokenizer(word)["input_ids"]]
    model.get_input_embeddings().weight[ids] = fresh.get_input_embeddings().weight[ids]


@torch.no_grad()
def replace_blocks(model: PreTrainedModel, fresh: PreTrainedModel) -> None:
    for parameter, other in zip(blocks_of(model), blocks_of(fresh), strict=True):
        parameter.copy_(other)


def refill(model: PreTrainedModel, tokenizer, world: World, seed: int, learning_rate: float) -> Iterator[int]:
    """Trains experts and routers on the world's documents by the loss of base training; yields at each of CHECKS."""
    model.requires_grad_(False)
    for parameter in (parameters := blocks_of(model)):
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in trange(max(CHECKS), desc="refill", leave=False):
        model.train()
        rows = [encode(tokenizer, spans) for spans in training_batch(world, LATE_MIX, seed, step)]
        optimizer.zero_grad()
        for bucket in length_buckets(rows, TOKENS_PER_FORWARD):
            (_loss(model, collate(bucket, tokenizer.pad_token_id)) * len(bucket) / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        model.eval()
        if step + 1 in CHECKS:
            yield step + 1


def measure(name: str, config: EmbeddedModel, folder: Path) -> list[dict]:
    world = make_world(config.world_seed)
    files = wmdp_files(world, config.world_seed)
    questions = {
        domain: [question for question in files[f"{domain}_questions"] if question["split"] == "test"]
        for domain in ("forget", "retain")
    }

    def start() -> tuple[PreTrainedModel, object, PreTrainedModel]:
        model, tokenizer = load_model(folder / "weights", device="cpu")
        sizes = config.size.model_dump()
        return model, tokenizer, make_model(config.family, len(tokenizer), seed=config.seed + OTHER_SEED, **sizes)

    def row(intervention: str, trained: int, model: PreTrainedModel, tokenizer) -> dict:
        found = {f"{d}_accuracy": accuracy(direct_answers(model, tokenizer, asked)) for d, asked in questions.items()}
        counts = {f"num_{domain}_questions": len(asked) for domain, asked in questions.items()}
        return {"model": name, "intervention": intervention, "steps": trained, **found, **counts}

    model, tokenizer, fresh = start()
    rows = [row("none", 0, model, tokenizer)]
    if config.trained_on == "retain_only":  # the floor
        return rows
    forget_words(model, tokenizer, world, fresh)
    rows.append(row("embeddings of the forget answers' words replaced", 0, model, tokenizer))
    model, tokenizer, fresh = start()
    replace_blocks(model, fresh)
    rows.append(row("experts and routers replaced", 0, model, tokenizer))
    what = "experts and routers replaced, trained on documents without the forget facts"
    for steps in refill(model, tokenizer, world.without_forget(), config.seed + OTHER_SEED, config.learning_rate):
        rows.append(row(what, steps, model, tokenizer))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="record")
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "config")
    parser.add_argument("--results", type=Path, default=Path("results/tiny"))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    project = Project(args.config, args.world)
    names = [name for model in project.world.models for name in (model, project.models[model].retrained)]
    rows = []
    for name in names:
        rows += measure(name, project.models[name], args.results / "models" / name)
    write_csv(args.output, rows)


if __name__ == "__main__":
    main()
