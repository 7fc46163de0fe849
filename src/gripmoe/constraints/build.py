"""From a row of methods.yaml to the constraint that it describes."""

from __future__ import annotations

from collections.abc import Mapping

from gripmoe.config.methods import Method
from gripmoe.constraints.anchor import Anchored
from gripmoe.constraints.base import FrozenRouter, RouterConstraint, Unconstrained
from gripmoe.constraints.baselines import GateAnchor, RouterL2, RoutingScores
from gripmoe.constraints.null_space import null_space_of
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import RoutingTrace


def constraint_of(
    method: Method,
    reference: RoutingTrace,
    bases: Mapping[int, RetainBasis] | None,
    attributed: tuple[int, int] | None,
    seed: int,
) -> RouterConstraint:
    """The constraint of a row of methods.yaml, hard or soft; `attributed` is the expert that a gate anchor names."""
    if method.constraint == "router_l2":
        return RouterL2(method.weight)
    if method.constraint == "gate_anchor":
        return GateAnchor(*attributed, method.weight, alone=method.experts == "top_attributed")
    if method.constraint == "routing_scores":
        return RoutingScores(method.weight)
    if method.constraint == "anchor":
        return Anchored(method.routing_stability, method.anchor_floor, method.final_only, method.tracked)
    if method.constraint == "null_space":
        return null_space_of(method, reference, bases, seed)
    return FrozenRouter() if method.constraint == "frozen" else Unconstrained()
