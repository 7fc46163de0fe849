"""Attacks: does the knowledge come back? Each is a function without arguments that says what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from gripmoe.moe import MoEModel

Scores = Sequence[float]  # of the items that were asked, in their order: right or wrong, or a measure of a text
Recall = Callable[[MoEModel], Scores]  # asks a model


@dataclass(frozen=True)
class Found:
    """Flat metrics; and by metric the score of each item (by id) whose mean it is, where it is one."""

    metrics: dict[str, float]
    scores: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def over(cls, ids: Sequence[str], scores: Mapping[str, Scores], **others: float) -> Found:
        """The scores of the items `ids` and their means, and `others`, which are no means."""
        by_id = {name: dict(zip(ids, map(float, values), strict=True)) for name, values in scores.items()}
        return cls({**{name: mean(values) for name, values in scores.items()}, **others}, by_id)


def mean(scores: Scores) -> float:
    """NaN of nothing."""
    return fmean(scores) if scores else float("nan")


def highest(found: Iterable[Scores]) -> Scores:
    """The scores of the attack that found most."""
    return max(found, key=mean)


@contextmanager
def kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within the block these may change; then they are what they were. Copies lie in host memory, so that GPUs hold no
    more than the models."""
    own = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in own:
                parameter.copy_(before)


def by_item(found: Found) -> list[dict]:
    """A row per item that any attack asked, with its score under each, empty where it was not asked."""
    ids = dict.fromkeys(item for scores in found.scores.values() for item in scores)
    return [{"id": item, **{name: scores.get(item, "") for name, scores in found.scores.items()}} for item in ids]
