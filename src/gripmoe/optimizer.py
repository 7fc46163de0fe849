"""AdamW, in full or in little memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def make_adamw(kind: str, groups: Iterable[Mapping[str, Any]], **settings) -> torch.optim.Optimizer:
    """ "adamw" keeps two states in the dtype of each parameter. "adamw_8bit" keeps them in 8 bits, and rounds bf16
    weights up or down at random: rounded to the nearest, most of them would never move at a usual learning rate.

    Raises ValueError where torchao, which has the latter, is missing."""
    if kind == "adamw":
        return torch.optim.AdamW(groups, foreach=True, **settings)
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise ValueError(
            "optimizer 'adamw_8bit' needs torchao: run `make gpu` or pip install 'gripmoe[gpu]', or take `adamw`"
        ) from None
    return AdamW8bit(groups, bf16_stochastic_round=True, **settings)
