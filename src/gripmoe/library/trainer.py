"""A constraint in transformers' `Trainer`, and in TRL's trainers, which build on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from gripmoe.constraints.hooks import ConstraintHandle
from gripmoe.data.documents import Batch
from gripmoe.io.files import atomic_path
from gripmoe.library.constrain import constrain
from gripmoe.moe import MoEModel
from gripmoe.moe.model import unwrapped

STATE = "constraint_handle.pt"  # in every checkpoint folder
NAMED = "a checkpoint that does not lie in `output_dir` is named by `resume_from_checkpoint` of its arguments"


class ConstraintCallback(TrainerCallback):
    """Constrains when training begins, and closes its `handle` when training ends.

    Where training may resume, the original weights are kept on the CPU until training begins: by then `Trainer` has
    loaded those of the checkpoint. They are put back for `constrain` to see, and the checkpoint is read again, since
    `Trainer` looks for weights by the names in the file and does not find fused experts.
    """

    handle: ConstraintHandle

    def __init__(self, retain: Iterable[Batch | Mapping[str, Tensor]], settings: dict[str, Any]):
        self._retain, self._settings = list(retain), settings
        self._original: dict[str, Tensor] | None = None
        self._moe: MoEModel | None = None

    def on_init_end(self, args, state, control, model=None, **kwargs):
        self._moe = MoEModel(unwrapped(model))  # routers in fp32, before they are wrapped, or loaded from a checkpoint
        if args.resume_from_checkpoint or (Path(args.output_dir).is_dir() and get_last_checkpoint(args.output_dir)):
            self._original = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if hasattr(self, "handle"):
            self.handle.close()  # an earlier training may have ended in an error
        if self._moe:
            self._moe.release()  # from here on the handle has its own
        original, self._original = self._original, None
        if not state.global_step:
            self.handle = constrain(model, optimizer, self._retain, **self._settings)
            return
        if original is None:
            raise ValueError(
                f"training resumes at step {state.global_step}, and what the routers were before is not known: give "
                f"this callback to the Trainer when it is made, on the original model; {NAMED}"
            )
        asked = args.resume_from_checkpoint  # or True: the last one
        folder = Path(asked) if isinstance(asked, (str, Path)) else _checkpoint(args, state.global_step)
        saved = _state_in(folder, state.global_step)
        trained = type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
        if any(not _is_one_of(now, trained[name], original[name]) for name, now in model.state_dict().items()):
            raise ValueError(f"the trainer resumes from another checkpoint than {folder}: {NAMED}")
        model.load_state_dict(original)
        self.handle = constrain(model, optimizer, self._retain, **self._settings)
        try:
            self.handle.load_state_dict(saved)
            model.load_state_dict(trained)
        except BaseException:
            self.handle.close()
            raise

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            with atomic_path(_checkpoint(args, state.global_step) / STATE) as file:
                torch.save({"step": state.global_step, "handle": self.handle.state_dict()}, file)

    def on_train_end(self, args, state, control, **kwargs):
        self.handle.close()


def trainer_callback(retain: Iterable[Batch | Mapping[str, Tensor]], **settings: Any) -> ConstraintCallback:
    """A callback for transformers' `Trainer` and TRL's trainers, which make their optimizer late: it calls
    `gripmoe.constrain(model, optimizer, retain, **settings)` (Sec. 4.2) when training begins and closes its `handle`
    when training ends. After an error close the handle, or call `train` again, which closes it and constrains anew.
    docs/library.md says how to resume.

    Raises nothing itself. The trainer raises ValueError when it is made on a model of an unknown family; `train` raises
    what `constrain` and the handle do, and ValueError if the checkpoint to resume from was saved without this callback,
    or of another model, method or documents."""
    return ConstraintCallback(retain, settings)


def _checkpoint(args, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _is_one_of(now: Tensor, trained: Tensor, original: Tensor) -> bool:
    """Whether a tensor has been loaded from the checkpoint, or not found there."""
    now = now.to("cpu", torch.float32)
    return torch.equal(now, trained) or torch.equal(now, original.float())


def _state_in(checkpoint: Path, step: int) -> dict:
    """The handle's state as `on_save` left it. Raises ValueError if it is not there, or of another step."""
    file = checkpoint / STATE
    saved = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
    if saved.get("step") != step:
        raise ValueError(
            f"training resumes at step {step}, and {file} does not hold the handle's state of that step; {NAMED}"
        )
    return saved["handle"]
