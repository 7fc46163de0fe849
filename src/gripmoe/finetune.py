"""Finetuning on documents: what makes a model recite the news that it is then to forget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from gripmoe.checkpoint import load_state, save_state
from gripmoe.data.corpora import in_batches
from gripmoe.data.documents import IGNORED, Row
from gripmoe.moe import MoEModel
from gripmoe.objectives import cross_entropy
from gripmoe.optimizer import make_adamw
from gripmoe.unlearning import epoch_rows


def finetune(
    model: PreTrainedModel,
    rows: Sequence[Row],
    *,
    epochs: int,
    learning_rate: float,
    optimizer: str = "adamw",
    batch_size: int,
    pad_id: int,
    seed: int,
    state_file: Path,
    save_every: int = 50,
) -> list[float]:
    """Trains all of `model` in place on documents, with a learning rate that falls to zero, and returns the loss of
    each step. Resumes from `state_file`; the result is the same as without the interruption."""
    moe = MoEModel(model)  # its routers are in fp32 from here on, and so are their states
    adamw = make_adamw(optimizer, [{"params": list(model.parameters())}], lr=learning_rate, weight_decay=0.0)
    losses: list[float] = (load_state(state_file, model, adamw) or {"losses": []})["losses"]
    steps = epochs * (len(rows) // min(batch_size, len(rows)))
    model.train()
    for step in tqdm(range(len(losses), steps), initial=len(losses), total=steps, desc="finetune"):
        if step and step % save_every == 0:
            save_state(state_file, model, adamw, losses=losses)
        for group in adamw.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
        adamw.zero_grad()
        batches = in_batches(epoch_rows(rows, min(batch_size, len(rows)), seed, step), pad_id)
        scored = [int((batch.labels[:, 1:] != IGNORED).sum()) for batch in batches]
        losses.append(0.0)
        for batch, count in zip(batches, scored, strict=True):  # as one batch, in passes of bounded memory
            loss = cross_entropy(moe, batch.to(model.device)) * (count / sum(scored))
            loss.backward()
            losses[-1] += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.manual_seed(1_000_000 * seed + step)  # of stochastic rounding, the same wherever it is resumed
        adamw.step()
    model.eval()
    return losses
