"""Relearning: how fast a little finetuning brings the answers back, beside a model that never knew them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gripmoe.attacks.scores import Recall, Scores, kept
from gripmoe.config.training import Relearning
from gripmoe.data.corpora import epoch_rows
from gripmoe.data.documents import Row, collate
from gripmoe.moe import MoEModel
from gripmoe.training.objectives import cross_entropy
from gripmoe.training.optimizers import make_adamw


def relearning(
    model: MoEModel,
    documents: Sequence[Row],
    recall: Recall,
    settings: Relearning,
    *,
    checks: Sequence[int] = (0, 5, 10, 20),
    pad_id: int = 0,
    seed: int = 0,
) -> dict[int, Scores]:
    """What `recall` says that the model knows after so many AdamW steps on `documents`, all parameters training;
    afterwards `model` is what it was.

    Let it ask about facts that `documents` do not hold: what they hold, any model learns.
    """
    known = {}
    with _trainable(model, settings.gradient_checkpointing):
        groups = [{"params": list(model.model.parameters())}]
        optimizer = make_adamw(settings.optimizer, groups, lr=settings.learning_rate)
        for step in range(max(checks) + 1):
            if step in checks:
                model.model.eval()
                known[step] = recall(model)
            if step < max(checks):
                model.model.train()
                optimizer.zero_grad()
                batch = collate(epoch_rows(documents, settings.batch_size, seed, step), pad_id)
                cross_entropy(model, batch.to(model.model.device)).backward()
                optimizer.step()
    return known


@contextmanager
def _trainable(model: MoEModel, gradient_checkpointing: bool) -> Iterator[None]:
    """Within the block all parameters train; then they are what they were."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.model.parameters()]
    if gradient_checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.requires_grad_(True)
    try:
        with kept(model.model.parameters()):
            yield
    finally:
        model.model.eval()
        if gradient_checkpointing:
            model.model.gradient_checkpointing_disable()
        for parameter, requires_grad in trained:
            parameter.grad = None
            parameter.requires_grad_(requires_grad)
