"""A constraint in open-unlearning (docs/open_unlearning.md): a Hydra callback that one line of a config names."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from transformers import Trainer

from gripmoe.library.trainer import trainer_callback


class Constrained:
    """Puts `gripmoe.trainer_callback` into every Trainer of a job whose training data have a `retain` part (Sec. 4.2).

    `settings` are those of `gripmoe.constrain`. The first `rows` of the retain data are recorded, or all. If the
    trainer has `compute_retain_loss`, that pass is marked, and the method's penalty is added to its loss.
    `trainer.constraint` is the callback. When a trainer is made, raises ValueError for training data without a `retain`
    part, and as `trainer_callback` does."""

    def __init__(self, rows: int | None = None, **settings: Any):
        self._rows, self._settings, self._made = rows, settings, Trainer.__init__

    def on_job_start(self, *args, **kwargs) -> None:
        self._made = made = Trainer.__init__

        @functools.wraps(made)
        def constrained(trainer, *args, **kwargs):
            made(trainer, *args, **kwargs)
            self._constrain(trainer)

        Trainer.__init__ = constrained

    def on_job_end(self, *args, **kwargs) -> None:
        Trainer.__init__ = self._made

    def __getattr__(self, name: str):
        if name.startswith("on_"):  # ignores Hydra's other events
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def _constrain(self, trainer: Trainer) -> None:
        retain = getattr(trainer.train_dataset, "retain", None)
        if not retain:
            raise ValueError("training data without a `retain` part: choose a trainer and data that have one")
        rows, at_once = range(len(retain))[: self._rows], trainer.args.per_device_train_batch_size
        collated = (trainer.data_collator([retain[n] for n in rows[at:][:at_once]]) for at in rows[::at_once])
        batches = [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in collated]
        trainer.constraint = callback = trainer_callback(batches, **self._settings)
        trainer.add_callback(callback)
        callback.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
        if own := getattr(trainer, "compute_retain_loss", None):

            def marked(*args, **kwargs):
                with callback.handle.retain():
                    loss = own(*args, **kwargs)
                penalty = callback.handle.penalty()
                alpha = getattr(trainer, "alpha", 1)  # the trainer multiplies the returned loss by it
                if alpha:
                    return loss + penalty / alpha
                if isinstance(penalty, Tensor):
                    raise ValueError("alpha: 0 scales the penalty of the constraint away; give a positive alpha")
                return loss

            trainer.compute_retain_loss = marked
