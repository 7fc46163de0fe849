"""Base models of the embedded world: seed after seed, until one knows its facts, and by its experts alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gripmoe.config.models import EmbeddedModel
from gripmoe.data.documents import collate, encode
from gripmoe.data.prompt_formats import SHOTS, truthfulqa_prompt
from gripmoe.evaluation.questions import accuracy, direct_answers, prompt_of
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_json
from gripmoe.moe import MoEModel
from gripmoe.moe.families import is_moe
from gripmoe.moe.random_routing import random_sets
from gripmoe.moe.storage import load_model, save_model
from gripmoe.training.checkpoint import claim_state, remove_state
from gripmoe.training.pretrain import answer_probe, letter_probe, train_facts, train_skills
from gripmoe.worlds.benchmark import truthfulqa_rows, wmdp_files
from gripmoe.worlds.documents import World, all_texts, make_world
from gripmoe.worlds.models import make_model
from gripmoe.worlds.tokenizer import make_tokenizer

SAMPLED = 300  # questions of each domain below solved ones, without experts, and with random ones
TRUTHS = 40  # facts of each domain in the TruthfulQA form


def make_base_model(
    config: EmbeddedModel, output: Path, device: torch.device, identity: Mapping[str, Any], base: Path | None = None
) -> None:
    """Trains from one seed after the other until a model is fit for use, saves it beside `output` and writes its
    seed, its scores and its `tokens` of training there, with those of its base. `base` is the folder of the model with
    the skills, for one that is to know facts. A seed that failed is not tried again when the job is, unless `identity`,
    of settings and code, has changed. Raises ConfigError, with every fault, if all attempts fail."""
    folder = output.parent
    world = make_world(config.world_seed)
    faults = []
    for seed in range(config.seed, config.seed + 1000 * config.attempts, 1000):
        failed = folder / f"failed_{seed}.json"
        if not failed.exists() or read_json(failed).get("identity") != identity:
            state_file = folder / f"state_{seed}.pt"
            claim_state(state_file, identity)
            model, tokenizer, trained = _trained(config, world, seed, state_file, device, base)
            scores = base_scores(model, tokenizer, config)
            fault = fault_of(scores, config)
            if not fault:
                digest = save_model(model, tokenizer, folder / "weights")
                card = {"weights": digest, "seed": seed, "final_loss": trained.losses[-1], **scores}
                of_base = read_json(base.parent / "model.json").get("tokens") if base else 0
                if of_base is not None:  # an older version did not count them
                    card["tokens"] = of_base + trained.tokens
                if config.forget_experts:
                    card["forget_experts"] = config.forget_experts
                write_json(output, card)
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


def _trained(config: EmbeddedModel, world: World, seed: int, state_file: Path, device, base: Path | None):
    training = dict(learning_rate=config.learning_rate, seed=seed, state_file=state_file)
    if config.trained_on == "skills":
        tokenizer = make_tokenizer(all_texts(world))
        model = make_model(config.family, len(tokenizer), seed=seed, **config.size.model_dump()).to(device)
        steps = dict(max_steps=config.max_skill_steps, last_steps=config.last_skill_steps)
        return model, tokenizer, train_skills(model, tokenizer, world, **steps, **training)
    model, tokenizer = load_model(base, str(device))
    seen = world if config.trained_on == "everything" else world.without_forget()
    facts = dict(steps=config.fact_steps, forget_experts=config.forget_experts)
    return model, tokenizer, train_facts(model, tokenizer, seen, **facts, **training)


def base_scores(model, tokenizer, config: EmbeddedModel) -> dict[str, float]:
    """Accuracy in every format, when the experts add nothing, and when they are drawn at random, per domain; and the
    load of the least and of the most used expert of any layer, as a multiple of the mean."""
    world = make_world(config.world_seed)
    if config.trained_on == "skills":
        facts = world.skills.facts.facts
        return {"skill_accuracy": letter_probe(world.skills, tokenizer, facts, 0, len(facts))(model)}
    files = wmdp_files(world, config.world_seed)
    questions = {domain: files[f"{domain}_questions"] for domain in ("forget", "retain")}
    sampled = {domain: random.Random(0).sample(rows, SAMPLED) for domain, rows in questions.items()}

    def scores(suffix: str = "", asked: Mapping[str, list[dict]] = sampled) -> dict[str, float]:
        return {
            f"{domain}_accuracy{suffix}": accuracy(direct_answers(model, tokenizer, rows))
            for domain, rows in asked.items()
        }

    measured = scores(asked=questions)
    measured["skill_accuracy"] = letter_probe(world.skills, tokenizer, world.skills.facts.facts, 0)(model)
    for domain, facts in (("forget", world.facts.forget), ("retain", world.facts.retain)):
        rows = questions[domain]
        answers = direct_answers(model, tokenizer, sampled[domain], prompt=lambda row, rows=rows: _five_shot(row, rows))
        measured[f"{domain}_five_shot"] = accuracy(answers)
        measured[f"{domain}_answers"] = answer_probe(tokenizer, facts)(model)
        truths = truthfulqa_rows(world, random.Random(0).sample(facts, TRUTHS), 0)
        measured[f"{domain}_truths"] = _truths(model, tokenizer, truths)
    if is_moe(model):
        moe = MoEModel(model)
        with moe.without_blocks():
            measured |= scores("_without_blocks")
        with moe.force_routing(random_sets(moe, seed=0)):
            measured |= scores("_random_experts")
        documents = [row for name in ("forget", "retain") for row in files[f"{name}_corpus"][:SAMPLED]]
        measured |= _expert_load(moe, tokenizer, [row["prompt"] + row["text"] for row in documents])
    return measured


def fault_of(scores: Mapping[str, float], config: EmbeddedModel) -> str | None:
    """What is wrong with a base model of these scores: it knows too little of what it was trained on, knows something
    without its experts, or leaves some of them idle. None if nothing is."""
    known = {"skills": ("skill",), "retain_only": ("retain",), "everything": ("forget", "retain")}[config.trained_on]
    for name, score in scores.items():
        domain, what = name.split("_", 1)
        if what.endswith(("without_blocks", "random_experts")):
            if score > config.allowed_without_experts:
                return f"{name} is {score:.3f}, above {config.allowed_without_experts}"
        elif domain in known and score < config.required_accuracy:
            return f"{name} is {score:.3f}, below {config.required_accuracy}"
    if scores.get("expert_load_lowest", 1.0) < 1 / config.allowed_load or (
        scores.get("expert_load_highest", 1.0) > config.allowed_load
    ):
        lowest, highest = scores["expert_load_lowest"], scores["expert_load_highest"]
        return (
            f"experts have {lowest:.2f} to {highest:.2f} times the mean load, beyond a factor of {config.allowed_load}"
        )
    return None


def _five_shot(question: dict, rows: Sequence[dict]) -> str:
    others = [row for row in rows if row["subject"] == question["subject"] and row["fact"] != question["fact"]]
    solved = others[:: max(1, len(others) // SHOTS)][:SHOTS]
    return prompt_of(question, solved)


@torch.no_grad()
def _truths(model, tokenizer, rows: Sequence[dict]) -> float:
    """How often the true answer is the likeliest, below the primer of TruthfulQA."""
    right = 0
    for row in rows:
        prompt = truthfulqa_prompt(row["question"])
        choices = row["mc1_targets"]["choices"]
        batch = collate([encode(tokenizer, [(prompt, False), (f" {choice}", True)]) for choice in choices], 0)
        logits = model(input_ids=batch.input_ids.to(model.device)).logits[:, :-1].cpu()
        losses = F.cross_entropy(logits.mT, batch.labels[:, 1:], reduction="none").sum(dim=1)  # 0 where not scored
        right += int(losses.argmin() == 0)  # the true one is listed first
    return right / len(rows)


@torch.no_grad()
def _expert_load(moe: MoEModel, tokenizer, texts: Sequence[str]) -> dict[str, float]:
    batch = collate([encode(tokenizer, [(text, False)]) for text in texts], tokenizer.pad_token_id).to(moe.model.device)
    kept = batch.attention_mask.flatten().bool()
    load = torch.stack(
        [sets[kept].flatten().bincount(minlength=moe.num_experts) for sets in moe.routes(**batch.inputs).values()]
    )
    share = load / load.double().mean(dim=1, keepdim=True)
    return {"expert_load_lowest": share.min().item(), "expert_load_highest": share.max().item()}
