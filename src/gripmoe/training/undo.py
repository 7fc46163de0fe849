"""UNDO (Lee et al. 2025): an unlearned model is distilled into a copy of itself that is partly noise."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from tqdm import trange

from gripmoe.config.methods import UndoConfig
from gripmoe.data.corpora import epoch_rows, fitting_batch_size
from gripmoe.data.documents import Row, collate, length_buckets
from gripmoe.io import distributed
from gripmoe.moe import MoEModel
from gripmoe.moe.modes import checkpointing, train_only
from gripmoe.training.objectives import OriginalPredictions
from gripmoe.training.optimizers import finite_norm, make_adamw


def undo(model: MoEModel, retain: Sequence[Row], settings: UndoConfig, *, pad_id: int, seed: int) -> dict[str, float]:
    """Corrects in place: weights W of experts become (1 - noise) W + noise noise_scale N, with N of Xavier's
    initialisation, and then learn the predictions that the model made before on retain documents. All other weights,
    routers too, are frozen.
    Returns the last `distillation_loss`, and the `tokens` that were passed forward and backward. Raises ConfigError if
    a loss or gradient is not finite."""
    size = fitting_batch_size(retain, settings.batch_size)
    rows = [epoch_rows(retain, size, seed, step) for step in range(settings.steps)]
    buckets = length_buckets(list({row.id: row for drawn in rows for row in drawn}.values()))
    device, tokens = model.model.device, 0
    experts = train_only(model.model, (p for layer in model.all_layers for p in model.other_parameters(layer)))
    model.model.eval()
    teacher = OriginalPredictions(model, [collate(bucket, pad_id).to(device) for bucket in buckets], "UNDO teacher")
    biases = {parameter for name, parameter in model.model.named_parameters() if name.endswith("bias")}
    mix_in_noise(experts, settings.noise, seed, biases, settings.noise_scale)
    optimizer = make_adamw(settings.optimizer, [{"params": experts}], lr=settings.learning_rate, weight_decay=0.0)
    model.model.train()
    with checkpointing(model.model, settings.gradient_checkpointing):
        for step in trange(settings.steps, desc="undo"):
            torch.manual_seed(1_000_000 * seed + step)
            batch = collate(rows[step], pad_id).to(device)
            tokens += int(batch.attention_mask.sum())
            optimizer.zero_grad()
            loss = teacher.divergence(model, batch)
            loss.backward()
            distributed.clip_gradients(experts, 1.0, finite_norm(loss.item(), experts, step))
            optimizer.step()
    model.model.eval().requires_grad_(True)
    return {"distillation_loss": loss.item(), "tokens": tokens}


@torch.no_grad()
def mix_in_noise(
    parameters: Sequence[nn.Parameter],
    share: float,
    seed: int,
    biases: Collection[nn.Parameter] = (),
    scale: float = 1.0,
) -> None:
    """Each becomes (1 - share) of itself plus `share` times `scale` of Xavier's noise, which is none for vectors and
    `biases`."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.mul_(1 - share)
        if parameter.ndim > 1 and parameter not in biases:
            noise = torch.randn(parameter.shape, generator=generator) * (2 / sum(parameter.shape[-2:])) ** 0.5
            parameter.add_(noise.to(parameter), alpha=share * scale)
