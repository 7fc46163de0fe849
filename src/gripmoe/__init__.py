"""Unlearning in mixture-of-experts models under geometric router constraints (the GRIP paper), measured honestly.

`gripmoe.constrain` holds a router in anybody's training loop. Nothing heavy is imported until it is asked for.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["constrain"]


def __getattr__(name: str):
    if name == "constrain":
        from gripmoe.constraints import constrain

        return constrain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
