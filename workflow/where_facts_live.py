"""Measures which parameters of an embedded base model hold its facts.

    python workflow/where_facts_live.py --world record_main --results results/tiny --output where_facts_live.csv

Parameters are replaced by random ones. Then the replaced experts and routers train as in stage B of base training, but
without the forget facts; all other parameters are frozen. If forget accuracy returns, experts and routers did not hold
the forget facts: no document of this training states one. `snakemake` makes the base models of the world.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from shared import CONFIG
from transformers import PreTrainedModel

from gripmoe.config.models import EmbeddedModel
from gripmoe.config.project import Project
from gripmoe.data.documents import encode
from gripmoe.evaluation.questions import accuracy, direct_answers
from gripmoe.io.files import write_csv
from gripmoe.moe.storage import load_model
from gripmoe.training.pretrain import block_parameters, train_facts
from gripmoe.training.word_erasure import erase_words, fresh_embeddings
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import make_world
from gripmoe.worlds.models import make_model

ERASED_WORDS = (10, 20, 30, 40, 60)
OTHER_SEED = 777_000  # added to the model's seed, so that replacement blocks differ from its initial blocks


@torch.no_grad()
def replace_blocks(model: PreTrainedModel, fresh: PreTrainedModel) -> None:
    for parameter, other in zip(block_parameters(model), block_parameters(fresh), strict=True):
        parameter.copy_(other)


def measure(name: str, config: EmbeddedModel, folder: Path) -> list[dict]:
    world = make_world(config.world_seed)
    files = wmdp_files(world, config.world_seed)
    questions = {
        domain: [question for question in files[f"{domain}_questions"] if question["split"] == "test"]
        for domain in ("forget", "retain")
    }

    def row(intervention: str, trained: int, model: PreTrainedModel, tokenizer) -> dict:
        found = {f"{d}_accuracy": accuracy(direct_answers(model, tokenizer, asked)) for d, asked in questions.items()}
        counts = {f"num_{domain}_questions": len(asked) for domain, asked in questions.items()}
        return {"model": name, "intervention": intervention, "steps": trained, **found, **counts}

    model, tokenizer = load_model(folder / "weights", device="cpu")
    rows = [row("none", 0, model, tokenizer)]
    if config.trained_on == "retain_only":  # the floor
        return rows
    documents = [
        [encode(tokenizer, [(row["prompt"] + row["text"], True)]) for row in files[f"{side}_corpus"]]
        for side in ("forget", "retain")
    ]
    fresh_Vd = fresh_embeddings(model)
    for count in ERASED_WORDS:  # each count erases the words of those before it
        erase_words(model, *documents, fresh_Vd, count)
        rows.append(row(f"embeddings of {count} words typical of forget documents replaced", 0, model, tokenizer))
    model, tokenizer = load_model(folder / "weights", device="cpu")
    sizes = config.size.model_dump()
    fresh = make_model(config.family, len(tokenizer), seed=config.seed + OTHER_SEED, **sizes)
    replace_blocks(model, fresh)
    rows.append(row("experts and routers replaced", 0, model, tokenizer))
    training = dict(steps=config.fact_steps, learning_rate=config.learning_rate, seed=config.seed + OTHER_SEED)
    with tempfile.TemporaryDirectory() as scratch:
        train_facts(model, tokenizer, world.without_forget(), **training, state_file=Path(scratch) / "state.pt")
    what = "experts and routers replaced, trained on documents without the forget facts"
    return [*rows, row(what, config.fact_steps, model, tokenizer)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="record")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--results", type=Path, default=Path("results/tiny"))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    project = Project(args.config, args.world)
    names = [name for model in project.world.models for name in (model, project.models[model].retrained) if name]
    rows = []
    for name in names:
        rows += measure(name, project.models[name], args.results / "models" / name)
    write_csv(args.output, rows)


if __name__ == "__main__":
    main()
