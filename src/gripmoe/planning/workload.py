"""What `gripmoe.planning.fake.measure` measures."""

from __future__ import annotations

from typing import Any, TypedDict


class Workload(TypedDict, total=False):
    """A step of a published model. `Costs` computes the last three keys with; `measure` does not read them."""

    model: dict[str, Any]  # a row of models.yaml
    what: str  # a key of `fake.STEPS`
    layers: int  # how many the measured model has
    processes: int  # each on a GPU of its own
    rows: list[int]  # of a batch; in unlearning, of a forget and of a retain batch
    length: int  # tokens of a row
    news: bool  # evaluation: whether texts are scored, in place of letter prompts
    training: dict[str, Any]  # settings
    objective: str  # unlearning: its class
    method: dict[str, Any]  # unlearning: a row of methods.yaml
    traced: int  # unlearning: recorded tokens of a null space
    models: int  # how many are in memory
    in_part: dict[str, int]  # layers that "run" or are "trained", if not all
    every: int  # of the method, whose projection is measured in each step
