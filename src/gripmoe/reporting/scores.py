"""Scores of a run that are computed from its other numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import comb, inf

FOUR_WAY = 0.25  # chance of a four-way question


def at_equal_forgetting(history: Sequence[dict[str, float]], targets: dict[str, float]) -> dict[str, float]:
    """Retain scores on dev items at the moment when the last forget score meets its target, interpolated between two
    checks. Runs go on until some checks in a row meet the target. Empty if a score never meets its target."""
    for before, after in pairwise(history):
        if not targets or not all(after.get(name, inf) <= target for name, target in targets.items()):
            continue
        above = {name: target for name, target in targets.items() if before[name] > target}
        share = max(((before[name] - at) / (before[name] - after[name]) for name, at in above.items()), default=0.0)
        return {
            f"{name}_at_target": before[name] + share * (after[name] - before[name])
            for name in ("retain_accuracy", "knowmem_retain")
            if name in after
        }
    return {}


def tradeoff_area(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """Area under the curve of retain accuracy over forget accuracy, both on dev questions: the mean, over levels of
    forget accuracy from chance to 1, of the best retain accuracy of a check at that level or below. Chance counts where
    no check came so low, so that a run that does not forget has a small area. Empty without both accuracies."""
    checks = [check for check in history if {"forget_accuracy", "retain_accuracy"} <= check.keys()]
    if not checks:
        return {}
    best, area, level = FOUR_WAY, 0.0, FOUR_WAY
    for check in sorted(checks, key=lambda check: check["forget_accuracy"]):
        reached = min(max(check["forget_accuracy"], level), 1.0)
        area, level = area + best * (reached - level), reached
        best = max(best, check["retain_accuracy"])
    return {"tradeoff_area": (area + best * (1.0 - level)) / (1.0 - FOUR_WAY)}


def expected_overlap(num_experts: int, top_k: int) -> float:
    """Expected Jaccard similarity of two independent uniform expert sets: the floor of routing stability."""
    of_common = (comb(top_k, n) * comb(num_experts - top_k, top_k - n) * n / (2 * top_k - n) for n in range(top_k + 1))
    return sum(of_common) / comb(num_experts, top_k)


OVERLAPS = [
    kind + part
    for kind in ("routing_stability", "forget_routing_stability")
    for part in ("", "_router_only", "_representation_only")
]


def corrected_for_chance(metrics: Mapping[str, float]) -> dict[str, float]:
    """`<name>_corrected` of each measure in OVERLAPS: 0 where expert sets agree as random ones do, 1 where they are
    equal."""
    if not metrics.get("num_experts", 0) > metrics.get("top_k", 0):
        return {}
    floor = expected_overlap(int(metrics["num_experts"]), int(metrics["top_k"]))
    return {f"{name}_corrected": (metrics[name] - floor) / (1 - floor) for name in OVERLAPS if name in metrics}
