"""Unlearning in mixture-of-experts models under geometric router constraints, after the GRIP paper.

`gripmoe.constrain` constrains the routers in any training loop (Method A and others). `gripmoe.remember` and
`gripmoe.realign` refit them after training (Method B). `gripmoe.save_model` and `gripmoe.load_model` keep routers
in fp32. `gripmoe.RelearningAdversary` makes forgetting more robust to relearning. `gripmoe.audit` says what an
unlearned model forgot and what it hides. `gripmoe.routing_stability` says how much of the routing stays. Heavy packages
are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gripmoe.auditing.run import audit as audit
    from gripmoe.constraints.hooks import Diverged as Diverged
    from gripmoe.geometry.routing import SelectionRule as SelectionRule
    from gripmoe.library.constrain import constrain as constrain
    from gripmoe.library.constrain import constrain_again as constrain_again
    from gripmoe.library.realign import realign as realign
    from gripmoe.library.realign import remember as remember
    from gripmoe.library.trainer import trainer_callback as trainer_callback
    from gripmoe.moe.families import register_family as register_family
    from gripmoe.moe.replay import replay_experts as replay_experts
    from gripmoe.moe.replay import routed_experts as routed_experts
    from gripmoe.moe.replay import routing_stability as routing_stability
    from gripmoe.moe.sharding import shard_experts as shard_experts
    from gripmoe.moe.storage import load_model as load_model
    from gripmoe.moe.storage import save_model as save_model
    from gripmoe.training.adversary import RelearningAdversary as RelearningAdversary
    from gripmoe.worlds.shipped import tiny_model as tiny_model

__version__ = "0.2.0"
_HOMES = {
    "Diverged": "constraints.hooks",
    "RelearningAdversary": "training.adversary",
    "SelectionRule": "geometry.routing",
    "audit": "auditing.run",
    "constrain": "library.constrain",
    "constrain_again": "library.constrain",
    "load_model": "moe.storage",
    "realign": "library.realign",
    "register_family": "moe.families",
    "remember": "library.realign",
    "replay_experts": "moe.replay",
    "routed_experts": "moe.replay",
    "routing_stability": "moe.replay",
    "save_model": "moe.storage",
    "shard_experts": "moe.sharding",
    "tiny_model": "worlds.shipped",
    "trainer_callback": "library.trainer",
}
__all__ = [*_HOMES]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"gripmoe.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
