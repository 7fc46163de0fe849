"""Relearning: how fast a little finetuning brings the answers back, beside a model that never knew them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from gripmoe.data.documents import Row, collate
from gripmoe.moe import MoEModel
from gripmoe.objectives import cross_entropy
from gripmoe.unlearning import epoch_rows


def relearning(
    model: MoEModel,
    documents: Sequence[Row],
    recall: Callable[[MoEModel], float],
    *,
    checks: Sequence[int] = (0, 5, 10, 20),
    learning_rate: float = 1e-3,
    batch_size: int = 16,
    pad_id: int = 0,
    seed: int = 0,
) -> dict[int, float]:
    """What `recall` says that the model knows after so many AdamW steps on `documents`, all parameters training;
    `model` stays.

    Let it ask about facts that `documents` do not hold: what they hold, any model learns.
    """
    trained = MoEModel(copy.deepcopy(model.model).requires_grad_(True))
    optimizer = torch.optim.AdamW(trained.model.parameters(), lr=learning_rate)
    device = trained.model.device
    known = {}
    for step in range(max(checks) + 1):
        if step in checks:
            trained.model.eval()
            known[step] = recall(trained)
        if step < max(checks):
            trained.model.train()
            optimizer.zero_grad()
            cross_entropy(trained, collate(epoch_rows(documents, batch_size, seed, step), pad_id).to(device)).backward()
            optimizer.step()
    return known
