"""Finetuning on documents: what makes a model recite the news that it is then to forget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from gripmoe.data.corpora import epoch_rows, fitting_batch_size, in_batches
from gripmoe.data.documents import IGNORED, Row
from gripmoe.io import distributed
from gripmoe.moe import MoEModel
from gripmoe.moe.modes import checkpointing, train_only
from gripmoe.training.checkpoint import load_state, save_state
from gripmoe.training.objectives import cross_entropy
from gripmoe.training.optimizers import finite_norm, make_adamw, set_rates

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def finetune(
    model: PreTrainedModel,
    rows: Sequence[Row],
    *,
    epochs: int,
    learning_rate: float,
    optimizer: str = "adamw",
    batch_size: int,
    blocks_only: bool = False,
    gradient_checkpointing: bool = False,
    pad_id: int,
    seed: int,
    state_file: Path,
    save_every: int = 50,
) -> list[float]:
    """Trains `model` in place on documents, with a learning rate that rises and then falls to zero, and returns the
    loss of each step. With `blocks_only` nothing but experts and routers trains; of a dense model, nothing but the
    feed-forward blocks. Resumes from `state_file`; the result is the same as without the interruption.

    Under torchrun every process calls this with the same arguments and its part of a model of `shard_experts`, and
    trains on its rows of every batch. Raises ConfigError if the rows cannot be shared out evenly, or a loss or gradient
    is not finite.
    """
    first = distributed.is_first()
    moe = MoEModel(model)  # its routers are in fp32 from here on, and so are their states
    parameters, own = list(model.parameters()), (distributed.rank(), distributed.processes())
    if blocks_only:
        modules = [module for layer in moe.all_layers for module in moe.feed_forward(layer)]
        parameters = train_only(model, (parameter for module in modules for parameter in module.parameters()))
    groups = [{"params": alike} for alike in distributed.by_sharding(parameters)]
    adamw = make_adamw(optimizer, groups, lr=learning_rate, weight_decay=0.0)
    losses: list[float] = (load_state(state_file, model, adamw) or {"losses": []})["losses"]
    batch_size = fitting_batch_size(rows, batch_size)
    steps = epochs * (len(rows) // batch_size)
    model.train()
    with checkpointing(model, gradient_checkpointing):
        for step in tqdm(
            range(len(losses), steps), initial=len(losses), total=steps, desc="finetune", disable=not first
        ):
            if step and step % save_every == 0:
                save_state(state_file, model, adamw, losses=losses)
            rate = learning_rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
            set_rates(adamw.param_groups, [rate] * len(groups))
            torch.manual_seed(1_000_000 * seed + step)  # of dropout, the same when resumed
            adamw.zero_grad()
            batches = in_batches(epoch_rows(rows, batch_size, seed, step), pad_id, *own)
            scored = [distributed.average(int((batch.labels[:, 1:] != IGNORED).sum())) for batch in batches]
            losses.append(0.0)
            for batch, count in zip(batches, scored, strict=True):  # as one batch, in passes of bounded memory
                loss = cross_entropy(moe, batch.to(model.device)) * (count / sum(scored))
                loss.backward()
                losses[-1] += distributed.average(loss.item())
            distributed.clip_gradients(parameters, 1.0, finite_norm(losses[-1], parameters, step))
            torch.manual_seed(1_000_000 * seed + step)  # of rounding, the same in all processes
            adamw.step()
    if blocks_only:
        model.requires_grad_(True)
    model.eval()
    return losses
