"""Types that several configuration files share."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
)

NAME = r"^[a-z][a-z0-9_]*$"
Name = Annotated[str, Field(pattern=NAME)]
Optimizer = Literal["adamw", "adamw_8bit", "adamw_fp32"]  # what bf16 weights need: `gripmoe.training.optimizers`
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _each_once(values: list) -> list:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} stands twice; leave one out")
    return values


Names = Annotated[list[Name], AfterValidator(_each_once)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
