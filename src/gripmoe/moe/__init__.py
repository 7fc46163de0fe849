"""A mixture-of-experts language model seen as routers and experts."""

from gripmoe.moe.model import MoEModel

__all__ = ["MoEModel"]
