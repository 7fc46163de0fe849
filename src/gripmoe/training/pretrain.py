"""Training of the embedded world's base models: skills in all parameters, then facts in experts and routers alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from gripmoe.data.documents import IGNORED, Batch, collate, encode_all, length_buckets
from gripmoe.data.prompt_formats import knowmem_prompt
from gripmoe.evaluation.questions import accuracy, direct_answers
from gripmoe.moe.families import is_moe
from gripmoe.moe.modes import evaluating, train_only
from gripmoe.training.checkpoint import load_state, save_state
from gripmoe.training.gradient_routing import GradientRouting
from gripmoe.training.muon import MuonWithAdamW
from gripmoe.worlds.benchmark import question_rows
from gripmoe.worlds.documents import (
    DRILL_MIX,
    FACT_MIX,
    HALF_FACT_MIX,
    SKILL_MIX,
    Mix,
    World,
    drill,
    training_batch,
)
from gripmoe.worlds.facts import QUESTION_WORDINGS, Fact

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BALANCE_WEIGHT = 0.04  # of the load-balancing loss of each layer, which is 1 for a uniform router
DRILL_BALANCE_WEIGHT = 0.001  # while a model learns the drills
TOKENS_PER_FORWARD = 1500
PROBE_EVERY = 50
SAVE_EVERY = 100
WARM_UP = 50  # steps
EARLY_LAYERS = 2  # the loss also reads the asked value after this many layers
QUERY_GAIN = 1.5  # of the norms of queries and keys where a model begins to match like with like

Probe = Callable[["PreTrainedModel"], float]


@dataclass(frozen=True)
class Phase:
    """A stretch of training: its mix, and the score of a probe that ends it; without a probe it lasts to the end."""

    mix: Mix
    probe: Probe | None = None
    level: float = 1.0
    balance_weight: float = BALANCE_WEIGHT


@dataclass(frozen=True)
class Trained:
    losses: list[float]  # of each step
    tokens: int  # that were passed forward and backward through the model


def train_skills(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    *,
    max_steps: int,
    last_steps: int,
    learning_rate: float,
    seed: int,
    state_file: Path,
) -> Trained:
    """Stage A: trains all of `model` in place on the skill world.

    The model is drilled until it names the letter of a word that it is shown. Then it learns the skill facts. The stage
    ends `last_steps` after it answers their letter questions, and after `max_steps` at the latest.
    """
    match_like_with_like(model)
    facts = world.skills.facts.facts
    phases = (
        Phase(DRILL_MIX, drill_probe(world.skills, tokenizer), 0.9, DRILL_BALANCE_WEIGHT),
        Phase(SKILL_MIX, letter_probe(world.skills, tokenizer, facts, seed), 0.9),
    )
    settings = dict(max_steps=max_steps, last_steps=last_steps, learning_rate=learning_rate)
    return _train(model, tokenizer, world.skills, phases, **settings, seed=seed, state_file=state_file)


def train_facts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    state_file: Path,
    forget_experts: int = 0,
) -> Trained:
    """Stage B: trains the blocks of a model that has the skills on the facts and news of `world`, with skill facts
    among them. No other parameter changes, and none has a gradient. With `forget_experts`, of the experts of each layer
    so many alone learn forget documents (`GradientRouting`)."""
    train_only(model, block_parameters(model))
    settings = dict(max_steps=steps, last_steps=max(1, steps // 2), learning_rate=learning_rate, seed=seed)
    routing = GradientRouting(forget_experts) if forget_experts else None
    phases = (Phase(HALF_FACT_MIX if routing else FACT_MIX),)
    with routing.masked(model) if routing else nullcontext():
        trained = _train(model, tokenizer, world, phases, **settings, state_file=state_file, routing=routing)
    model.requires_grad_(True)
    return trained


def block_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """All parameters of experts and routers, or of a dense model's MLPs."""
    return [parameter for layer in model.model.layers for parameter in layer.mlp.parameters()]


@torch.no_grad()
def match_like_with_like(model: PreTrainedModel) -> None:
    """Makes keys equal queries in the layers above EARLY_LAYERS. Their attention then begins with the tokens that are
    alike, which is how the letter of a known value is found; from independent weights this takes far longer to form."""
    for layer in model.model.layers[EARLY_LAYERS:]:
        attention = layer.self_attn
        attention.k_proj.weight.copy_(attention.q_proj.weight)
        for norm in ("q_norm", "k_norm"):
            if hasattr(attention, norm):
                getattr(attention, norm).weight.fill_(QUERY_GAIN)


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    phases: Sequence[Phase],
    *,
    max_steps: int,
    last_steps: int,
    learning_rate: float,
    seed: int,
    state_file: Path,
    routing: GradientRouting | None = None,
) -> Trained:
    """Trains what requires a gradient. The rate rises over WARM_UP steps and falls to 2 % within the last ones. Resumes
    from `state_file`; on CPU the result is the same as without the interruption."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = MuonWithAdamW(model, lr=learning_rate)
    progress = load_state(state_file, model, optimizer) or {"losses": [], "tokens": 0, "phase": 0, "end": max_steps}
    losses, tokens, phase, end = (progress[name] for name in ("losses", "tokens", "phase", "end"))
    resumed_at = len(losses)  # its probe had been asked when the state was saved
    parts = [(world, False)] if routing is None else [(world.without_forget(), False), (world.only_forget(), True)]
    model.train()
    bar = tqdm(desc="base model", initial=len(losses), total=end)
    while (step := len(losses)) < end:
        if step > resumed_at and step % PROBE_EVERY == 0 and end == max_steps and (probe := phases[phase].probe):
            score = probe(model)
            bar.set_postfix({"phase": phase + 1, "score": f"{score:.2f}"})
            if score >= phases[phase].level:
                phase += 1
            if phase == len(phases):
                phase -= 1
                bar.total = end = min(max_steps, step + last_steps)
        if step and step % SAVE_EVERY == 0:
            save_state(state_file, model, optimizer, losses=losses, tokens=tokens, phase=phase, end=end)
        optimizer.set_rate(min(1.0, (step + 1) / WARM_UP) * min(1.0, max(0.02, (end - step) / last_steps)))
        model.zero_grad()
        total = 0.0
        for part, of_forget in parts:
            if routing:
                routing.of_forget = of_forget
            documents = training_batch(part, phases[phase].mix, seed, step)
            rows = encode_all(tokenizer, ((str(n), document.spans) for n, document in enumerate(documents)))
            recalled = encode_all(tokenizer, (("", document.recalled) for document in documents))
            for bucket in length_buckets(rows, TOKENS_PER_FORWARD):
                pads = partial(collate, pad_id=tokenizer.pad_token_id)
                batch, early = pads(bucket), pads([recalled[int(row.id)] for row in bucket])
                labels = early.labels.to(model.device)
                loss = _loss(model, batch.to(model.device), labels, phases[phase].balance_weight, routing)
                loss = loss * len(bucket) / (len(rows) * len(parts))
                loss.backward()
                total += loss.item()
                tokens += int(batch.attention_mask.sum())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(total)
        bar.update()
    bar.close()
    model.eval()
    return Trained(losses, tokens)


def letter_probe(world: World, tokenizer, facts: Sequence[Fact], seed: int, count: int = 200) -> Probe:
    """Accuracy on letter questions about `facts`."""
    rows = question_rows(world, facts, 1, seed)
    rows = random.Random(f"probe {seed}").sample(rows, min(count, len(rows)))
    return lambda model: accuracy(direct_answers(model, tokenizer, rows))


def answer_probe(tokenizer, facts: Sequence[Fact]) -> Probe:
    """The share of `facts` that the model says when it is asked for them without options."""
    asked = [knowmem_prompt([], fact.question(number % len(QUESTION_WORDINGS))) for number, fact in enumerate(facts)]
    return _said(tokenizer, [[(prompt, False), (fact.value, True)] for prompt, fact in zip(asked, facts, strict=True)])


def drill_probe(world: World, tokenizer) -> Probe:
    rng = random.Random("probe")
    return _said(tokenizer, [drill(world, rng).spans for _ in range(30)])


def _said(tokenizer, documents: Sequence[Sequence]) -> Probe:
    """The share of scored tokens that are the most likely ones."""
    batch = collate(encode_all(tokenizer, (("", spans) for spans in documents)), tokenizer.pad_token_id)
    labels = batch.labels[:, 1:]

    @torch.no_grad()
    def probe(model: PreTrainedModel) -> float:
        with evaluating(model):
            guessed = model(input_ids=batch.input_ids.to(model.device)).logits[:, :-1].argmax(dim=-1).cpu()
        return (guessed == labels)[labels != IGNORED].double().mean().item()

    return probe


def _loss(
    model: PreTrainedModel,
    batch: Batch,
    early_labels: Tensor,
    balance_weight: float,
    routing: GradientRouting | None = None,
) -> Tensor:
    """Cross-entropy at the last layer and, on `early_labels`, after EARLY_LAYERS: there a value is known before its
    letter is sought, so that letters and plain answers share one recall. Labels are (rows, positions)."""
    has_routers = is_moe(model)
    # Right padding needs no attention mask under causal attention.
    router_logits = {"output_router_logits": True} if has_routers else {}
    output = model.model(input_ids=batch.input_ids, output_hidden_states=True, **router_logits)
    early = model.model.norm(output.hidden_states[EARLY_LAYERS])
    loss = _scored(model, output.last_hidden_state, batch.labels) + _scored(model, early, early_labels)
    if has_routers:
        # Imported here: whoever has a model has imported its classes.
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        top_k, kept = model.config.num_experts_per_tok, batch.attention_mask.flatten().bool()
        for logits in output.router_logits:  # given all at once, the function would balance their sum alone
            balanced = routing.own(logits) if routing else logits
            balance = load_balancing_loss_func((balanced,), balanced.shape[-1], top_k, batch.attention_mask)
            loss = loss + balance_weight / top_k * balance
            if routing:
                loss = loss + routing.leak(logits[kept])
    return loss


def _scored(model: PreTrainedModel, hidden: Tensor, labels: Tensor) -> Tensor:
    """Mean over documents of the loss summed over scored tokens and divided by the square root of their number, so that
    an article does not drown a letter."""
    labels = labels[:, 1:]
    scored = labels != IGNORED
    logits = model.lm_head(hidden[:, :-1][scored])
    weights = scored.sum(dim=1, keepdim=True).clamp(min=1).rsqrt().expand(labels.shape)[scored]
    return (F.cross_entropy(logits, labels[scored], reduction="none") * weights).sum() / len(labels)
