"""Data and models."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils.hub import cached_file, extract_commit_hash

from gripmoe import distributed
from gripmoe.attacks.forcing import random_sets
from gripmoe.catalogue import Data, EmbeddedModel, FinetunedModel, ModelConfig, Task
from gripmoe.checkpoint import claim_state, remove_state
from gripmoe.commands import identity_of, training_together
from gripmoe.data.corpora import load_corpus
from gripmoe.data.muse import news_files
from gripmoe.data.published import benchmark_files
from gripmoe.errors import ConfigError
from gripmoe.evaluation.choice import accuracy, direct_answers
from gripmoe.evaluation.muse import News, leakage, mean_score, news_scores
from gripmoe.files import exclusive, read_json, write_json, write_jsonl
from gripmoe.finetune import finetune
from gripmoe.moe import MoEModel
from gripmoe.moe.families import is_moe
from gripmoe.moe.placement import visible_devices
from gripmoe.moe.sharding import shard_experts
from gripmoe.moe.storage import load_model, load_published, save_model
from gripmoe.parsing import parse_settings
from gripmoe.pretrain import train_base
from gripmoe.provenance import recorded
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import all_texts, make_world
from gripmoe.worlds.models import make_model
from gripmoe.worlds.muse import muse_tables, write_repository
from gripmoe.worlds.tokenizer import make_tokenizer


def prepare_data(args) -> None:
    """Writes a benchmark's questions and corpora as JSON lines."""
    data = parse_settings(Data, args.settings)
    with recorded(args.output / "provenance.json", prepare_data):
        if data.source == "embedded" and data.kind == "news":
            with tempfile.TemporaryDirectory() as folder:
                write_repository(muse_tables(make_world(data.world_seed).news, data.world_seed), Path(folder))
                files = news_files(folder)
        elif data.source == "embedded":
            files = wmdp_files(make_world(data.world_seed), data.world_seed, data.retain)
        elif data.source == "muse":
            files = news_files(data.repository, data.revision, data.rows)
        else:
            files = benchmark_files(data)
        for name, rows in files.items():
            write_jsonl(args.output / f"{name}.jsonl", rows)


def prepare_model(args) -> None:
    """Trains an embedded base model, on a GPU if it is given one and sees one, or fetches a published one; checks that
    it answers the questions it should."""
    config = parse_settings(ModelConfig, args.settings)
    folder = args.output.parent
    with exclusive(folder), recorded(folder / "provenance.json", prepare_model):
        if config.source == "published":
            model, tokenizer = load_published(config)
            read = cached_file(config.id, "config.json", revision=config.revision)
            commit = extract_commit_hash(read, None)  # of the hub; a local folder has none
            digest = save_model(model, tokenizer, folder / "weights")
            source = {"id": config.id, "revision": config.revision or "main", "commit": commit}
            write_json(args.output, {"weights": digest, **source})
            return
        _train_embedded(config, folder, args.output, visible_devices()[0] if args.gpus else torch.device("cpu"))


def finetune_model(args) -> None:
    """Finetunes a base model on the documents of a news benchmark, all of them or those to retain; checks that it has
    learned them. Under torchrun in several processes together."""
    config = parse_settings(FinetunedModel, args.settings)
    task = parse_settings(Task, args.benchmark, "--benchmark")
    folder = args.output.parent
    with training_together(args.output, folder / "provenance.json", finetune_model):
        model, tokenizer = load_model(args.model.parent / "weights")
        shard_experts(model)
        names = ("retain", "held_out") if config.trained_on == "retain_only" else ("forget", "retain", "held_out")
        reading = {**task.reading, "end_id": tokenizer.eos_token_id}
        rows = [row for n in names for row in load_corpus(args.data / f"{n}_corpus.jsonl", tokenizer, **reading)]
        state_file = folder / "state.pt"
        files = (args.model, *sorted(args.data.glob("*.jsonl")))
        claim_state(state_file, identity_of(finetune_model, *files, settings=args.settings, benchmark=args.benchmark))
        losses = finetune(
            model,
            rows,
            epochs=config.epochs,
            learning_rate=config.learning_rate,
            optimizer=config.optimizer,
            batch_size=config.batch_size,
            gradient_checkpointing=config.gradient_checkpointing,
            pad_id=tokenizer.pad_token_id,
            seed=config.seed,
            state_file=state_file,
        )
        news = News.load(args.data)
        scores = news_scores(model, tokenizer, news, "dev", strip_prompts=task.strip_prompts)
        means = {name: mean_score(items) for name, items in scores.items()}
        wanted = ("knowmem_retain",) if config.trained_on == "retain_only" else tuple(means)
        if poor := [f"{name} {means[name]:.1f}" for name in wanted if means[name] < config.required]:
            raise ConfigError(
                f"finetuning did not reach the required {config.required:g}: {', '.join(poor)}. Give it more `epochs` "
                f"or another `learning_rate` in models.yaml, and delete {folder}"
            )
        digest = save_model(model, tokenizer, folder / "weights")
        leaks = leakage(model, tokenizer, news.privleak)
        if distributed.is_first():
            write_json(args.output, {"weights": digest, "final_loss": losses[-1], **means, **leaks})
        distributed.wait_for_all()
        remove_state(state_file)


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
