"""Constraints on routers: Method A, Method B, the anchor, baselines; and the hooks that apply them in a loop."""
