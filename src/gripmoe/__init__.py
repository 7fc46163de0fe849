"""Unlearning in mixture-of-experts models under geometric router constraints (the GRIP paper), measured honestly.

`gripmoe.constrain` holds the routers in anybody's training loop (Method A and its relatives), `gripmoe.remember` and
`gripmoe.realign` refit them afterwards (Method B), `gripmoe.save_model` and `gripmoe.load_model` leave them in fp32.
Nothing heavy is imported until it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gripmoe.constraints.hooks import Diverged
    from gripmoe.constraints.realignment import realign, remember
    from gripmoe.library.constrain import constrain
    from gripmoe.library.reparameterization import reparameterize
    from gripmoe.library.trainer import trainer_callback
    from gripmoe.moe.sharding import shard_experts
    from gripmoe.moe.storage import load_model, save_model

__version__ = "0.1.0"
__all__ = [
    "Diverged",
    "constrain",
    "load_model",
    "realign",
    "remember",
    "reparameterize",
    "save_model",
    "shard_experts",
    "trainer_callback",
]
_HOMES = {
    "Diverged": "constraints.hooks",
    "constrain": "library.constrain",
    "load_model": "moe.storage",
    "realign": "constraints.realignment",
    "remember": "constraints.realignment",
    "reparameterize": "library.reparameterization",
    "save_model": "moe.storage",
    "shard_experts": "moe.sharding",
    "trainer_callback": "library.trainer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"gripmoe.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
