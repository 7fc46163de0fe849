"""Attacks: does the knowledge come back? Each is a function without arguments that says what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Found:
    """Flat metrics, and for some attacks a row per item that was asked."""

    metrics: dict[str, float]
    items: list[dict] = field(default_factory=list)


Attack = Callable[[], Found]
