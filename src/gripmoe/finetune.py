"""Training of the embedded world's base models: the one to unlearn from, its retain-only oracle, the dense twin."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from gripmoe.checkpoint import load_state, save_state
from gripmoe.data.documents import IGNORED, collate, encode, length_buckets
from gripmoe.worlds.documents import EARLY_MIX, LATE_MIX, World, training_batch

LATE_FROM = 0.5  # of all steps
DECAY_FROM = 0.6
BALANCE_WEIGHT = 0.01  # of the load-balancing loss, which is 1 for a uniform router
TOKENS_PER_FORWARD = 1000


def train_base(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    state_file: Path,
    save_every: int = 100,
) -> list[float]:
    """Trains `model` in place on the world's training mix and returns the loss of each step.

    A loss is summed over a document's scored tokens and divided by their square root, so that an article does not drown
    a letter. Resumes from `state_file` if it exists; the result is the same as without the interruption.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=(0.9, 0.98),
        foreach=True,
    )
    progress = load_state(state_file, model, optimizer) or {"step": 0, "losses": []}
    losses: list[float] = progress["losses"]
    model.train()
    for step in (bar := tqdm(range(progress["step"], steps), "base model", initial=progress["step"], total=steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _schedule(step, steps)
        mix = EARLY_MIX if step < LATE_FROM * steps else LATE_MIX
        rows = [encode(tokenizer, spans) for spans in training_batch(world, mix, seed, step)]
        optimizer.zero_grad()
        total = 0.0
        for bucket in length_buckets(rows, TOKENS_PER_FORWARD):
            loss = _loss(model, collate(bucket, tokenizer.pad_token_id)) * len(bucket) / len(rows)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(total)
        bar.set_postfix(loss=f"{total:.3f}")
        if (step + 1) % save_every == 0:
            save_state(state_file, model, optimizer, step=step + 1, losses=losses)
    model.eval()
    return losses


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, flat, then linear to 2 %."""
    done = step / steps
    decay = 1.0 if done < DECAY_FROM else max(0.02, 1 - (done - DECAY_FROM) / (1 - DECAY_FROM))
    return min(1.0, (step + 1) / 100) * decay


def _loss(model: PreTrainedModel, batch) -> Tensor:
    # Right padding needs no attention mask under causal attention.
    has_routers = hasattr(model.config, "num_experts")
    output = model(input_ids=batch.input_ids, **({"output_router_logits": True} if has_routers else {}))
    labels = batch.labels[:, 1:]
    token_losses = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    scored = (labels != IGNORED).sum(dim=1).clamp(min=1)
    loss = (token_losses.view(labels.shape).sum(dim=1) / scored.sqrt()).mean()
    if has_routers:
        top_k = model.config.num_experts_per_tok
        balance = load_balancing_loss_func(output.router_logits, model.config.num_experts, top_k, batch.attention_mask)
        loss = loss + BALANCE_WEIGHT / top_k * balance
    return loss
