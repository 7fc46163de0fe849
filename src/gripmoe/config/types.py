"""Types that several configuration files share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gripmoe.config.reading import NAME, Mistake

Name = Annotated[str, Field(pattern=NAME)]
Optimizer = Literal["adamw", "adamw_8bit", "adamw_fp32"]  # what bf16 weights need: `gripmoe.training.optimizers`
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
BetweenZeroAndOne = Annotated[float, Field(gt=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, content: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in content if isinstance(content, dict) else ():
            if key not in known:
                raise Mistake(str(key), f"unknown key; valid keys: {', '.join(known)}")
        return content


def _each_once(values: list) -> list:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value!r} stands twice; leave one out")
    return values


def code_path(value: str) -> str:
    """Raises ValueError unless it is "module:name"."""
    module, _, name = value.partition(":")
    if not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError('give "module:name", as `my_file:my_function`')
    return value


CodePath = Annotated[str, AfterValidator(code_path)]
EachOnce = AfterValidator(_each_once)
Names = Annotated[list[Name], EachOnce]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
