"""A mixture-of-experts language model seen as routers and experts."""

from gripmoe.moe.model import MoEModel, RoutingRecorder

__all__ = ["MoEModel", "RoutingRecorder"]
