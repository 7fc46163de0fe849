"""The state of an interrupted run, replaced atomically, removed when the run has ended.

The state of one process is one file. Of several, each writes a numbered part; then the first writes a file that names
the number.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import atomic_path, read_json, write_json


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **progress) -> None:
    """Saves weights, optimizer states, and `progress` (plain values and tensors)."""
    processes = distributed.processes()
    state = {
        "processes": processes,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": progress,
    }
    if processes == 1:
        _save(path, state)
        return
    parts = _parts(path)
    number = 1 + max((int(part.name.split(".")[-2]) for part in parts), default=0)
    number = int(distributed.from_first_(torch.tensor(number)))
    _save(_part(path, number), state)
    distributed.wait_for_all()
    if distributed.is_first():
        _save(path, {"processes": processes, "number": number})
    distributed.wait_for_all()
    for part in parts:
        if part != _part(path, number):
            part.unlink()


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict | None:
    """Restores weights and optimizer in place and returns the progress; None without a state. Raises ConfigError if
    another number of processes saved it."""
    if not path.exists():
        return None
    state = _load(path)
    if state["processes"] != distributed.processes():
        raise ConfigError(
            f"{path} was saved by {state['processes']} processes and cannot be resumed by {distributed.processes()}: "
            "start as many, or delete the file to train from the beginning"
        )
    if distributed.processes() > 1:
        state = _load(_part(path, state["number"]))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # torch keeps what is on the CPU as it is: views, which hold the file's blocks after the next one has replaced it.
    of_torch = getattr(optimizer, "adamw", optimizer)  # of `MuonWithAdamW`
    for held in (*of_torch.state.values(), *of_torch.param_groups):
        held.update(_copied({name: value for name, value in held.items() if name != "params"}))
    return _copied(state["progress"])


def claim_state(path: Path, identity: Mapping[str, Any]) -> None:
    """Makes `path` the state of the run of this identity (JSON: configuration, inputs, code). The state of another run
    is removed with a warning."""
    if distributed.is_first():
        note = _note(path)
        if not (path.exists() and note.exists() and read_json(note) == identity):
            if path.exists():
                print(f"{path}: left by a run with another configuration, data or code; starting anew", file=sys.stderr)
            remove_state(path)  # also the parts of a state that was never whole
        write_json(note, identity)
    distributed.wait_for_all()


def remove_state(path: Path) -> None:
    """Removes the state of a run that has ended."""
    if distributed.is_first():
        path.unlink(missing_ok=True)
        _note(path).unlink(missing_ok=True)
        for part in path.parent.glob(f"{path.name}.*.part"):  # of all processes, also of an earlier run that had more
            part.unlink()


def _note(path: Path) -> Path:
    return path.with_name(f"{path.stem}.identity.json")


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{distributed.rank()}.{number}.part")


def _parts(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.name}.{distributed.rank()}.*.part"))


def _save(path: Path, state: dict) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:  # by name torch hides why it could not write
        torch.save(state, file)


def _copied(value: Any) -> Any:
    """The value with copies of its tensors that are on the CPU."""
    if type(value) is torch.Tensor:
        return value.clone() if value.device.type == "cpu" else value
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value


def _load(path: Path) -> dict:
    # Mapped, so that what is copied into place need not first lie whole in host memory.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
