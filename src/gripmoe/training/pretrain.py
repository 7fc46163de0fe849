"""Training of the embedded world's base models: the one to unlearn from, its retrained model, the dense twin."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from gripmoe.data.documents import IGNORED, collate, encode, length_buckets
from gripmoe.data.prompt_formats import knowmem_prompt
from gripmoe.evaluation.questions import accuracy, direct_answers
from gripmoe.moe.families import is_moe
from gripmoe.training.checkpoint import load_state, save_state
from gripmoe.worlds.benchmark import question_rows
from gripmoe.worlds.documents import FACT_MIX, LATE_MIX, LETTER_MIX, READING_MIX, Mix, World, training_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BALANCE_WEIGHT = 0.01  # of the load-balancing loss, which is 1 for a uniform router
TOKENS_PER_FORWARD = 1000
PROBE_EVERY = 50


@dataclass(frozen=True)
class Phase:
    """A stretch of base training: its mix, the learning rate of all but the feed-forward blocks as a multiple, and the
    score of a probe ("letters" or "answers") that ends it; the last phase has a number of steps instead."""

    mix: Mix
    attention: float
    until: tuple[str, float] | None


# Attention learns to read options and to name a letter; then, while it hardly moves, the experts learn the facts; then
# attention learns to read them from there. In one go, attention and embeddings learn the facts by themselves: the
# blocks can be taken out without a loss, and nothing that an expert forgets matters.
PHASES = (
    Phase(LETTER_MIX, 1.0, ("letters", 0.6)),
    Phase(FACT_MIX, 0.1, ("answers", 0.93)),
    Phase(READING_MIX, 1.0, ("letters", 0.93)),
    Phase(LATE_MIX, 0.1, None),
)


def train_base(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    *,
    max_early_steps: int,
    late_steps: int,
    learning_rate: float,
    seed: int,
    state_file: Path,
    save_every: int = 100,
) -> list[float]:
    """Trains `model` in place on the world's training mix and returns the loss of each step.

    The phases before the last one end by their probes, or together after `max_early_steps`; the last one has
    `late_steps` and a falling learning rate. A loss is summed over a document's scored tokens and divided by their
    square root, so that an article does not drown a letter. Resumes from `state_file` if it exists; on CPU the result
    is the same as without the interruption.
    """
    parameters = list(model.parameters())
    blocks = {p for layer in model.model.layers for p in layer.mlp.parameters()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1 and p in blocks], "weight_decay": 0.01, "attention": False},
            {
                "params": [p for p in parameters if p.ndim > 1 and p not in blocks],
                "weight_decay": 0.01,
                "attention": True,
            },
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "attention": False},
        ],
        lr=learning_rate,
        betas=(0.9, 0.98),
        foreach=True,
    )
    progress = load_state(state_file, model, optimizer) or {"losses": [], "phase": 0, "late_from": max_early_steps}
    losses: list[float] = progress["losses"]
    resumed_at = len(losses)  # its probe had been asked when the state was saved
    phase: int = progress["phase"]
    late_from: int = progress["late_from"]
    probes = {"letters": letter_probe(world, tokenizer, seed), "answers": answer_probe(world, tokenizer, seed)}
    model.train()
    bar = tqdm(desc="base model", initial=len(losses), total=late_from + late_steps)
    while (step := len(losses)) < late_from + late_steps:
        if step > resumed_at and step % PROBE_EVERY == 0 and PHASES[phase].until:
            name, level = PHASES[phase].until
            score = probes[name](model)
            bar.set_postfix({"phase": phase + 1, name: f"{score:.2f}"})
            if score >= level:
                phase += 1
        if step == max_early_steps:
            phase = len(PHASES) - 1
        if phase == len(PHASES) - 1 and step < late_from:
            late_from = step
            bar.total = late_from + late_steps
        if step and step % save_every == 0:
            save_state(state_file, model, optimizer, losses=losses, phase=phase, late_from=late_from)
        for group in optimizer.param_groups:
            multiple = PHASES[phase].attention if group["attention"] else 1.0
            group["lr"] = learning_rate * multiple * _schedule(step, late_from, late_steps)
        rows = [encode(tokenizer, spans) for spans in training_batch(world, PHASES[phase].mix, seed, step)]
        optimizer.zero_grad()
        total = 0.0
        for bucket in length_buckets(rows, TOKENS_PER_FORWARD):
            loss = _loss(model, collate(bucket, tokenizer.pad_token_id).to(model.device)) * len(bucket) / len(rows)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(total)
        bar.update()
    bar.close()
    model.eval()
    return losses


def letter_probe(world: World, tokenizer, seed: int, count: int = 200) -> Callable[[PreTrainedModel], float]:
    """Accuracy on letter questions about facts that the world's training mix holds."""
    rows = random.Random(f"probe {seed}").sample(question_rows(world, world.facts.facts, 1, seed), count)
    return lambda model: accuracy(direct_answers(model, tokenizer, rows))


def answer_probe(world: World, tokenizer, seed: int, count: int = 200) -> Callable[[PreTrainedModel], float]:
    """How many facts the model says when it is asked for them, without options."""
    facts = random.Random(f"probe {seed}").sample(world.facts.facts, min(count, len(world.facts.facts)))
    rows = [encode(tokenizer, [(knowmem_prompt([], fact.question(0)), False)]) for fact in facts]
    batch = collate(rows, tokenizer.pad_token_id)
    wanted = torch.tensor([tokenizer(fact.value)["input_ids"][0] for fact in facts])

    @torch.no_grad()
    def probe(model: PreTrainedModel) -> float:
        model.eval()
        hidden = model.model(**batch.to(model.device).inputs).last_hidden_state
        last = hidden[torch.arange(len(rows)), batch.attention_mask.sum(dim=1) - 1]
        model.train()
        return (model.lm_head(last).argmax(dim=-1).cpu() == wanted).double().mean().item()

    return probe


def _schedule(step: int, late_from: int, late_steps: int) -> float:
    """Linear warm-up, flat, then from a fifth of the late steps on linear to 2 %."""
    done = (step - late_from) / late_steps
    decay = 1.0 if done < 0.2 else max(0.02, 1 - (done - 0.2) / 0.8)
    return min(1.0, (step + 1) / 100) * decay


def _loss(model: PreTrainedModel, batch) -> Tensor:
    # Right padding needs no attention mask under causal attention.
    has_routers = is_moe(model)
    output = model(input_ids=batch.input_ids, **({"output_router_logits": True} if has_routers else {}))
    labels = batch.labels[:, 1:]
    token_losses = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    scored = (labels != IGNORED).sum(dim=1).clamp(min=1)
    loss = (token_losses.view(labels.shape).sum(dim=1) / scored.sqrt()).mean()
    if has_routers:
        # With a model, whose classes are imported then.
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        top_k = model.config.num_experts_per_tok
        balance = load_balancing_loss_func(output.router_logits, model.config.num_experts, top_k, batch.attention_mask)
        loss = loss + BALANCE_WEIGHT / top_k * balance
    return loss
