"""A constraint held in transformers' `Trainer`, and in TRL's trainers, which build on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from gripmoe.config import Method
from gripmoe.data.documents import Batch
from gripmoe.guard import RouterGuard, constrain


def trainer_callback(retain: Iterable[Batch | Mapping[str, Tensor]], *, method: str | Method = "expert_specific"):
    """A callback for transformers' `Trainer` and TRL's trainers, which make their optimizer late: it constrains at the
    beginning of training and lets go at the end. Its `guard` is there for methods that look at the retain forward."""
    from transformers import TrainerCallback

    class GuardCallback(TrainerCallback):
        guard: RouterGuard | None = None

        def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            if state.global_step:
                raise ValueError(
                    f"training resumes at step {state.global_step}: its routers are not the original ones any more. "
                    "Call gripmoe.constrain on the original model, then load weights, optimizer and guard.state_dict()"
                )
            self.guard = constrain(model, optimizer, retain, method=method)

        def on_train_end(self, args, state, control, **kwargs):
            self.guard.close()

    return GuardCallback()
