"""A constraint held in transformers' `Trainer`, and in TRL's trainers, which build on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from gripmoe.adapter import constrain
from gripmoe.data.documents import Batch
from gripmoe.guard import RouterGuard


class GuardCallback(TrainerCallback):
    """Constrains at the beginning of training, when the trainer has made its optimizer, and lets go at the end; in
    between its `guard` is there for methods that look at the retain forward."""

    guard: RouterGuard

    def __init__(self, retain: Iterable[Batch | Mapping[str, Tensor]], settings: dict[str, Any]):
        self._retain, self._settings = retain, settings

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step:
            raise ValueError(
                f"training resumes at step {state.global_step}: its routers are not the original ones any more. "
                "Call gripmoe.constrain on the original model, then load weights, optimizer and guard.state_dict()"
            )
        self.guard = constrain(model, optimizer, self._retain, **self._settings)

    def on_train_end(self, args, state, control, **kwargs):
        self.guard.close()


def trainer_callback(retain: Iterable[Batch | Mapping[str, Tensor]], **settings: Any) -> GuardCallback:
    """A callback for transformers' `Trainer` and TRL's trainers, which make their optimizer late: it holds
    `gripmoe.constrain(model, optimizer, retain, **settings)` from the beginning of training to its end. Where training
    ends in an error, close its `guard`."""
    return GuardCallback(retain, settings)
