"""Unlearning in mixture-of-experts models under geometric router constraints (the GRIP paper), measured honestly.

`gripmoe.constrain` holds the routers in anybody's training loop (Method A and its relatives), `gripmoe.remember` and
`gripmoe.realign` refit them afterwards (Method B). Nothing heavy is imported until it is asked for.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["constrain", "realign", "remember", "reparameterize", "shard_experts", "trainer_callback"]


def __getattr__(name: str):
    if name == "reparameterize":
        from gripmoe.reparameterization import reparameterize

        return reparameterize
    if name == "shard_experts":
        from gripmoe.moe.sharding import shard_experts

        return shard_experts
    if name in __all__:
        from gripmoe import guard

        return getattr(guard, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
