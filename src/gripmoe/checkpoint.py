"""The state of an interrupted run: one file, replaced atomically, removed when the run has ended."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gripmoe.files import atomic_path


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **progress) -> None:
    """Everything a loop needs to go on: weights, optimizer states, and `progress` (plain values and tensors)."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}
    with atomic_path(path) as temporary:
        torch.save(state, temporary)


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict | None:
    """Restores weights and optimizer in place and returns the progress; None if there is nothing to resume."""
    if not path.exists():
        return None
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["progress"]
