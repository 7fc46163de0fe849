"""Constraints on routers: Method A, Method B, the anchor, baselines; and the hooks that keep them in a loop."""
