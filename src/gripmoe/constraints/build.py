"""The constraint that a row of methods.yaml describes, from recorded routing; the memory that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gripmoe.config.methods import Method
from gripmoe.constraints.anchor import Anchored
from gripmoe.constraints.base import FrozenRouter, RouterConstraint, Unconstrained
from gripmoe.constraints.baselines import GateAnchor, RouterL2, RoutingScores, attributed_expert
from gripmoe.constraints.null_space import constrained_trace, null_space_of
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import RoutingTrace
from gripmoe.io.errors import ConfigError
from gripmoe.io.imports import make_object
from gripmoe.moe import MoEModel


@dataclass(frozen=True)
class Built:
    """A constraint, and by layer the experts that train under it; None where all do."""

    constraint: RouterConstraint
    scope: dict[int, list[int]] | None


def build(
    method: Method,
    retain: RoutingTrace,
    forget: RoutingTrace | None = None,
    *,
    bases: Callable[[RoutingTrace], Mapping[int, RetainBasis]],
    layers: Collection[int] | None = None,
    seed: int,
) -> Built:
    """The constraint of a row, from the original routing of retain tokens if `method.has_bases`, and of forget tokens
    if `method.looks_at_forget`. `bases` gives the fixed bases of a trace. SEUF's expert is in one of `layers`: those
    that train and that the losses look at. Raises ConfigError for a class of one's own that is not found, takes other
    settings or is no constraint."""
    attributed = None
    if method.attributes:
        attributed = attributed_expert(forget, [layer for layer in forget if layers is None or layer in layers])
    scope = {attributed[0]: [attributed[1]]} if method.experts == "top_attributed" else None
    match method.constraint:
        case "frozen":
            constraint = FrozenRouter()
        case "router_l2":
            constraint = RouterL2(method.weight)
        case "gate_anchor":
            constraint = GateAnchor(*attributed, method.weight, alone=scope is not None)
        case "routing_scores":
            constraint = RoutingScores(method.weight)
        case "anchor":
            constraint = Anchored(method.routing_stability, method.anchor_floor, method.final_only)
        case "null_space":
            trace = constrained_trace(method, retain, forget) if method.has_bases else retain
            constraint = null_space_of(method, trace, bases(trace) if method.has_bases else None, seed)
        case str(path) if method.own_constraint:
            constraint = _own(path, method.settings, seed)
        case _:
            constraint = Unconstrained()
    return Built(constraint, scope)


def _own(path: str, settings: Mapping[str, Any], seed: int) -> RouterConstraint:
    constraint = make_object(path, settings, seed, f"constraint {path!r}")
    if not isinstance(constraint, RouterConstraint):
        raise ConfigError(
            f"constraint {path!r} is no RouterConstraint; derive its class from "
            "gripmoe.constraints.base:RouterConstraint"
        )
    return constraint


def held_bytes(thing: object) -> int:
    """Bytes of the tensors that an object keeps in memory, itself or in its parts; shared storage counts once."""
    storages: dict[int, int] = {}
    waiting, known = [thing], set()
    while waiting:
        item = waiting.pop()
        if id(item) in known:
            continue
        known.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif isinstance(item, MoEModel):
            continue
        elif isinstance(item, RouterConstraint) or type(item).__module__.startswith("gripmoe."):
            waiting += vars(item).values()
    return sum(storages.values())
