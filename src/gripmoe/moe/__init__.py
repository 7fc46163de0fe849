"""A mixture-of-experts language model seen as routers and experts."""

from gripmoe.moe.model import MoEModel
from gripmoe.moe.recording import RoutingRecorder

__all__ = ["MoEModel", "RoutingRecorder"]
