"""What methods.yaml may say: one row is one method."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from gripmoe.config.reading import _catalogue
from gripmoe.config.types import Fraction, Name, NonNegative, Strict
from gripmoe.io.errors import ConfigError


class EpsNullConfig(Strict):
    value: PositiveFloat
    kind: Literal["absolute", "relative", "energy"]
    bands: dict[Literal["early", "middle", "late"], PositiveFloat] = {}  # thirds of the layers with their own


class Method(Strict):
    """Independent axes; a named row of methods.yaml is one point in their space."""

    baseline: Literal["original", "retrained"] | None = None  # nothing is trained
    constraint: (
        Literal["none", "frozen", "null_space", "router_l2", "gate_anchor", "routing_scores", "anchor"] | None
    ) = None
    experts: Literal["all", "top_attributed"] = "all"  # which experts train: all, or one of the network (SEUF)
    replay: bool = False  # train under the original model's expert sets
    critical_experts: PositiveInt | None = None  # per layer, whose retain signal is raised to their forget activity
    form: Literal["sound", "paper"] = "sound"
    granularity: Literal["expert", "layer"] = "expert"
    surface: Literal["retain", "forget", "combined"] = "retain"  # whose routing a null space holds
    basis: Literal["original", "minibatch", "tracked"] | None = None
    forgetting: Fraction = 0.95  # of tracked bases: what a step leaves of the weight of those before
    eps_null: EpsNullConfig | None = None
    max_rank: PositiveInt | None = None  # of a null space's bases: the strongest directions alone are held
    projects: Literal["update", "gradient"] = "update"  # the paper says both, so its form has both
    safety_margin: NonNegative = 1e-3
    kaczmarz_steps: PositiveInt = 100  # Algorithm 1's k_max, in the paper's form
    kaczmarz_tolerance: NonNegative = 1e-4  # and its eta
    weight: PositiveFloat = 1.0  # of a soft constraint
    routing_stability: Fraction = 0.95  # that an anchor holds on retain batches
    anchor_floor: NonNegative = 1.0  # of an anchor's weight
    final_only: bool = False  # anchor the final hidden state alone
    tracked: bool = False  # an anchor's router follows its inputs instead of being frozen
    correction: Literal["restore", "realign"] | None = None  # of the routers, when training has ended
    corrects: Name | None = None  # the method whose finished run is corrected; else the stop rule sees the correction
    retain_tokens: PositiveInt | None = None  # N_r of Method B; all recorded tokens if absent
    training: dict[str, Any] = {}  # what this method changes of Training

    @model_validator(mode="after")
    def _one_kind(self) -> Method:
        kinds = [self.baseline is not None, self.constraint is not None, self.corrects is not None]
        if sum(kinds) != 1:
            raise ValueError("give exactly one of `baseline`, `constraint`, `corrects`")
        if self.corrects and not self.correction:
            raise ValueError("`corrects` needs `correction: restore` or `correction: realign`")
        if self.training and not self.constraint:
            raise ValueError("`training` is for a method that trains: one with a `constraint`")
        if (self.constraint == "null_space") != (self.eps_null is not None and self.basis is not None):
            raise ValueError("`constraint: null_space` needs `eps_null` and `basis`, no other constraint has them")
        if self.constraint == "null_space" and self.form == "paper" and self.basis != "minibatch":
            raise ValueError("`form: paper` of the null space works with `basis: minibatch`")
        if self.constraint == "null_space" and self.form == "paper" and self.granularity != "expert":
            raise ValueError("`form: paper` of the null space has a basis for each expert: leave out `granularity`")
        if self.max_rank and (self.constraint != "null_space" or self.form == "paper"):
            raise ValueError("`max_rank` is a choice of `constraint: null_space` in its sound form")
        if self.constraint != "null_space" or self.form != "paper":
            for name in ("kaczmarz_steps", "kaczmarz_tolerance", "projects"):
                if getattr(self, name) != Method.model_fields[name].default:
                    raise ValueError(f"`{name}` is a choice of `constraint: null_space` with `form: paper`")
        if self.surface != "retain" and self.basis != "original":
            raise ValueError("`surface` is a choice of `basis: original`")
        return self

    @property
    def trains(self) -> bool:
        return self.constraint is not None

    @property
    def has_bases(self) -> bool:
        return self.basis == "original"

    @property
    def attributes(self) -> bool:
        """Whether it looks for the expert that serves the forget tokens most."""
        return self.experts == "top_attributed" or self.constraint == "gate_anchor"

    @property
    def looks_at_forget(self) -> bool:
        """Whether its constraint is made from the original routing of forget tokens."""
        return self.attributes or self.surface != "retain"

    @property
    def looks_at_passes(self) -> bool:
        """Whether its constraint looks at training passes, through all layers."""
        return not (self.constraint in ("none", "frozen") or self.has_bases)


AXES = {  # the keys of methods.yaml that have an effect in a row only beside these words
    "constraint": ("experts", "replay", "critical_experts", "correction", "training"),
    "corrects": ("correction",),
    "constraint: null_space": ("form", "granularity", "surface", "basis", "eps_null", "max_rank", "safety_margin")
    + ("projects", "kaczmarz_steps", "kaczmarz_tolerance"),
    "basis: tracked": ("forgetting",),
    "constraint: router_l2": ("weight",),
    "constraint: gate_anchor": ("weight",),
    "constraint: routing_scores": ("weight",),
    "constraint: anchor": ("routing_stability", "anchor_floor", "final_only", "tracked"),
    "correction: realign": ("form", "retain_tokens"),
}


def _check_axes(name: str, method: Method, file: Path) -> None:
    """What a row says must have an effect, or somebody believes to have measured it."""
    words = {word for key in method.model_fields_set for word in (key, f"{key}: {getattr(method, key)}")}
    known = {"baseline", "constraint", "corrects", *(key for word in words for key in AXES.get(word, ()))}
    for key in sorted(method.model_fields_set - known):
        having = " or ".join(f"`{word}`" for word, keys in AXES.items() if key in keys)
        raise ConfigError(f"{file}: {name}.{key}: without effect here; it is a choice of {having}")


TABLE = Path(__file__).with_name("methods.yaml")


@functools.cache
def method_table() -> dict[str, Method]:
    """The methods that the package has, by name."""
    return read_methods(TABLE)


def read_methods(file: Path) -> dict[str, Method]:
    """The rows of a methods.yaml. Raises ConfigError for what is not valid or has no effect."""
    methods = _catalogue(file, Method)
    for name, method in methods.items():
        _check_axes(name, method, file)
    return methods
