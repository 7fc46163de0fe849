"""A constraint in transformers' `Trainer` and in TRL's trainers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from gripmoe.constraints.hooks import ConstraintHandle
from gripmoe.data.batches import batches_of, holds_texts, listed
from gripmoe.data.documents import Batch
from gripmoe.io import distributed
from gripmoe.io.files import atomic_path
from gripmoe.library.checks import check_forget, check_retain, warn_of_balancing
from gripmoe.library.constrain import Data, checked_method, constrain, constrain_again
from gripmoe.moe import MoEModel
from gripmoe.moe.adapters import unwrapped

STATE = "constraint_handle.pt"  # a file in every checkpoint folder
NAMED = "a checkpoint that does not lie in `output_dir` is named by `resume_from_checkpoint` of its arguments"


class ConstraintCallback(TrainerCallback):
    """Constrains routers when training begins, and closes its `handle` when training ends. Later trainings, and
    restarts after running out of memory, use the original model of the first training.

    If training may resume, the callback keeps the original weights on the CPU, because `Trainer` loads those of the
    checkpoint before training begins. The callback then puts the original weights back for `constrain`, and reads the
    checkpoint again: `Trainer` looks for weights by the names in the file, and does not find fused experts.
    """

    handle: ConstraintHandle

    def __getattr__(self, name: str):
        said = ": the handle is there once training has begun" if name == "handle" else ""
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}{said}")

    def __init__(self, retain: Data, settings: dict[str, Any]):
        self._retain, self._settings = _listed(retain), settings | {"forget": _listed(settings.get("forget", ()))}
        _check(self._retain, self._settings)
        self._original: dict[str, Tensor] | None = None
        self._moe: MoEModel | None = None

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if args.n_gpu > 1:
            raise ValueError(
                f"Trainer would run passes on {args.n_gpu} GPUs in threads (nn.DataParallel), which share the hooks of "
                "a constraint: start by torchrun, or show this process one GPU (CUDA_VISIBLE_DEVICES)"
            )
        self._moe = MoEModel(unwrapped(model))  # converts routers to fp32 before wrapping and loading
        if args.resume_from_checkpoint or (Path(args.output_dir).is_dir() and get_last_checkpoint(args.output_dir)):
            self._original = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}

    def on_train_begin(self, args, state, control, model=None, optimizer=None, processing_class=None, **kwargs):
        if self._moe:
            self._moe.release()  # the handle has a MoEModel of its own
        elif not hasattr(self, "handle") and distributed.processes() > 1:
            raise ValueError(
                "give this callback to the Trainer when it is made (`callbacks=[...]`): routers must be in fp32 before "
                "the model is wrapped for several processes"
            )
        original, self._original = self._original, None
        if state.global_step:
            self._resume(args, state, model, optimizer, processing_class, original)
        else:
            self._constrain(args, model, optimizer, processing_class)

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_evaluate or control.should_save:  # set by transformers' DefaultFlowCallback
            self.handle.settle()

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        if args.should_save:  # with `save_on_each_node`, of every node
            with atomic_path(_checkpoint(args, state.global_step) / STATE) as file:
                torch.save({"step": state.global_step, "handle": self.handle.state_dict()}, file)

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.handle.skip()  # a GradScaler may have skipped the step; after a step there is nothing left

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            self.handle.close()
        else:
            self.handle._close(settle=True)  # `Trainer` has loaded other routers since the last step
            _reload(unwrapped(model), state.best_model_checkpoint)

    def _constrain(self, args, model, optimizer, processing_class) -> None:
        if hasattr(self, "handle"):
            self.handle = constrain_again(self.handle, model, optimizer)
            return
        settings = self._settings
        if any(map(holds_texts, (self._retain, settings["forget"]))) and settings.get("tokenizer") is None:
            settings = settings | {"tokenizer": getattr(processing_class, "tokenizer", processing_class)}
        config = unwrapped(model).config.get_text_config()
        if not getattr(config, "output_router_logits", False):  # else `constrain` warns
            warn_of_balancing(model, args)
        self.handle = constrain(model, optimizer, self._retain, **settings)

    def _resume(self, args, state, model, optimizer, processing_class, original: dict[str, Tensor] | None) -> None:
        if original is None and not hasattr(self, "handle"):
            raise ValueError(
                f"training resumes at step {state.global_step}, and what the routers were before is not known: give "
                f"this callback to the Trainer when it is made, on the original model; {NAMED}"
            )
        asked = args.resume_from_checkpoint  # or True: the last one
        folder = Path(asked) if isinstance(asked, str | Path) else _checkpoint(args, state.global_step)
        saved = _state_in(folder, state.global_step)
        trained = _read_again(model, folder)
        for name, now in model.state_dict().items():  # as `Trainer` has read them, without fused experts
            unread = ".experts." in name if original is None else _equal(now, original[name])
            if not unread and not _equal(now, trained[name]):
                raise ValueError(f"the trainer resumes from another checkpoint than {folder}: {NAMED}")
        if original is not None and not hasattr(self, "handle"):
            model.load_state_dict(original)
        self._constrain(args, model, optimizer, processing_class)
        try:
            self.handle.load_state_dict(saved)
            model.load_state_dict(trained)
        except BaseException:
            self.handle.close()
            raise


def trainer_callback(retain: Data, **settings: Any) -> ConstraintCallback:
    """A callback for transformers' `Trainer` and TRL's trainers, which create their optimizer when training begins. It
    then calls `gripmoe.constrain(model, optimizer, retain, **settings)` (Sec. 4.2), and closes its `handle` when
    training ends. Texts need no `tokenizer`: the trainer's `processing_class` encodes them. Make one callback for each
    model. After an error, close the handle or call `train` again. docs/library.md says how to resume.

    Warns if a TRL trainer adds the load-balancing loss, and if the callback has to read the best model's experts again.
    Raises ValueError or KeyError for a wrong argument, TypeError for an unknown one. The trainer raises ValueError for
    a model of an unknown family. `train` raises what `constrain` and the handle raise, and ValueError if the checkpoint
    to resume from was saved without this callback, or belongs to another model, method or documents. Before training,
    `handle` raises AttributeError."""
    return ConstraintCallback(retain, settings)


def _listed(data: Data) -> Any:
    """`data` in a form that can be read more than once."""
    whole = Mapping | Batch | Tensor | str
    return data if isinstance(data, whole) or hasattr(data, "column_names") or data is None else listed(data)


def _check(retain: Any, settings: Mapping[str, Any]) -> None:
    inspect.signature(constrain).bind(None, None, retain, **settings)
    names = inspect.signature(checked_method).parameters
    method = checked_method(**{name: value for name, value in settings.items() if name in names})
    for name, data in (("retain", retain), ("forget", settings["forget"])):
        if not holds_texts(data) or settings.get("tokenizer") is not None:
            with warnings.catch_warnings(action="ignore"):  # `constrain` warns
                batches = batches_of(data, name, tokenizer=settings.get("tokenizer"))
            check_retain(batches) if name == "retain" else check_forget(batches, method)


def _checkpoint(args, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _read_again(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint. A model with adapters keeps its own: its checkpoint has no fused experts, and
    `Trainer` has loaded the rest."""
    if hasattr(model, "peft_config"):
        return {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    return type(model).from_pretrained(folder, dtype=torch.float32).state_dict()


def _equal(now: Tensor, then: Tensor) -> bool:
    return torch.equal(now.to("cpu", torch.float32), then.float())


def _reload(model: nn.Module, folder: str) -> None:
    """Reads the best checkpoint again if `Trainer` has left tensors of the last step in the model."""
    if hasattr(model, "peft_config") or any(isinstance(tensor, DTensor) for tensor in model.parameters()):
        return
    best = _read_again(model, Path(folder))
    left = [name for name, now in model.state_dict().items() if not _equal(now, best[name].cpu())]
    if left:
        model.load_state_dict(best)
        warnings.warn(
            f"transformers {transformers.__version__} leaves {len(left)} tensors of the last step in the best model, "
            f"such as {left[0]}; they are read again from {folder}",
            stacklevel=2,
        )


def _state_in(checkpoint: Path, step: int) -> dict:
    """The handle's state that `on_save` has written. Raises ValueError if it is missing or of another step."""
    file = checkpoint / STATE
    saved = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
    if saved.get("step") != step:
        raise ValueError(
            f"training resumes at step {step}, and {file} does not hold the handle's state of that step; {NAMED}"
        )
    return saved["handle"]
