"""What methods.yaml may say: one row is one method."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, WithJsonSchema, model_validator

from gripmoe.config.reading import Mistake, read_catalogue
from gripmoe.config.training import Finetuning
from gripmoe.config.types import BetweenZeroAndOne, Fraction, Name, NonNegative, Strict, code_path

TABLE = Path(__file__).with_name("methods.yaml")
ConstraintKind = Literal["none", "frozen", "null_space", "router_l2", "gate_anchor", "routing_scores", "anchor"]
OWN = "module:Class"  # stands for a constraint of one's own
AXES = {  # which axes have an effect in a row that has these words
    "constraint": {"experts", "replay", "correction", "training"},
    "experts: null_space": {"eps_null"},
    "corrects": {"correction"},
    "correction: realign": {"form", "retain_tokens"},
    "correction: undo": {"undo"},
    f"constraint: {OWN}": {"settings"},
    "constraint: null_space": {"form", "basis", "granularity", "eps_null", "projects"},
    "constraint: null_space with form: sound": {"max_rank"},
    "constraint: null_space with form: sound with projects: update": {"safety_margin"},
    "constraint: null_space with form: paper": {"surface"},
    "constraint: null_space with form: paper with granularity: expert": {
        "kaczmarz_steps",
        "kaczmarz_tolerance",
        "safety_margin",
    },
    "basis: original": {"surface"},
    "basis: original with form: sound with projects: update": {"every"},
    "constraint: router_l2": {"weight"},
    "constraint: gate_anchor": {"weight"},
    "constraint: routing_scores": {"weight"},
    "constraint: anchor": {"routing_stability", "anchor_floor", "final_only"},
}


class EpsNullConfig(Strict):
    value: PositiveFloat  # eigenvalues below it count as zero
    kind: Literal["absolute", "relative", "energy"]  # as it is, of the largest, or of the sum of all
    bands: dict[Literal["early", "middle", "late"], PositiveFloat] = {}  # other values for thirds of the layers


class UndoConfig(Finetuning):
    """Distillation on retain documents, of experts that are partly noise."""

    noise: Fraction  # UNDO's alpha: the share of noise in the weights of experts
    noise_scale: NonNegative = 1.0  # UNDO's beta: the noise in units of Xavier's initialisation
    steps: PositiveInt  # of distillation


def _kind_or_path(value: str) -> str:
    kinds = get_args(ConstraintKind)
    if ":" not in value and value not in kinds:
        raise ValueError(f"give one of {', '.join(kinds)}, or a class of your own, `my_file:MyConstraint`")
    return value if value in kinds else code_path(value)


ConstraintName = Annotated[
    str,
    AfterValidator(_kind_or_path),
    WithJsonSchema({"anyOf": [{"enum": list(get_args(ConstraintKind))}, {"const": OWN}]}),
]


class Method(Strict):
    """Independent axes, which methods.yaml explains; a row of it is one point in their space."""

    baseline: Literal["original", "retrained", "erase_words", "remove_experts", "external"] | None = None
    constraint: ConstraintName | None = None
    # An empty one is not written to run.yaml.
    settings: dict[str, int | float] = Field({}, exclude_if=lambda settings: not settings)
    experts: Literal["all", "top_attributed", "null_space"] = "all"
    replay: bool = False
    form: Literal["sound", "paper"] = "sound"
    granularity: Literal["expert", "layer"] = "expert"
    surface: Literal["retain", "forget", "combined"] = "retain"
    basis: Literal["original", "minibatch", "cached"] | None = None
    eps_null: EpsNullConfig | None = None
    max_rank: PositiveInt | None = None
    projects: Literal["update", "gradient", "both"] = "update"
    safety_margin: NonNegative = 1e-3
    every: PositiveInt = 1
    kaczmarz_steps: PositiveInt = 100
    kaczmarz_tolerance: NonNegative = 1e-4
    weight: PositiveFloat = 1.0
    routing_stability: BetweenZeroAndOne = 0.95
    anchor_floor: NonNegative = 1.0
    final_only: bool = False
    correction: Literal["restore", "realign", "undo"] | None = None
    corrects: Name | None = None
    retain_tokens: PositiveInt | None = None
    undo: UndoConfig | None = None
    training: dict[str, Any] = {}

    FITTED_WITH: ClassVar = {"granularity", "surface", "eps_null", "max_rank"}
    OF_BASES: ClassVar = {"constraint", "form", "basis"} | FITTED_WITH

    @model_validator(mode="after")
    def _every_axis_has_an_effect(self) -> Method:
        if sum(kind is not None for kind in (self.baseline, self.constraint, self.corrects)) != 1:
            raise ValueError("give exactly one of `baseline`, `constraint`, `corrects`")
        for axis in sorted(self.model_fields_set - {"baseline", "constraint", "corrects"}):
            rows = [words for words, axes in AXES.items() if axis in axes]
            if getattr(self, axis) != type(self).model_fields[axis].default and not any(map(self._has, rows)):
                choice = " or ".join(f"`{words}`" for words in rows)
                raise Mistake(axis, f"without effect here; it is a choice of {choice}")
        if found := self.without_effect(self.training, self.training.get("adversary_steps")):
            raise Mistake(f"training.{found[0]}", found[1])
        if self.corrects and not self.correction:
            raise ValueError("`corrects` needs `correction: restore`, `correction: realign` or `correction: undo`")
        if self.correction == "undo" and not (self.corrects and self.undo):
            raise ValueError("`correction: undo` needs `corrects`, a finished run, and `undo`")
        if self.experts == "null_space" and not self.eps_null:
            raise ValueError("`experts: null_space` needs `eps_null`")
        if self.constraint == "null_space":
            if not (self.eps_null and self.basis):
                raise ValueError("`constraint: null_space` needs `eps_null` and `basis`")
            if self.form == "paper" and self.basis not in ("minibatch", "cached"):
                raise ValueError("`form: paper` of the null space works with `basis: minibatch` or `basis: cached`")
            if self.basis == "cached" and self.eps_null.kind != "absolute":
                raise Mistake("eps_null.kind", "`basis: cached` grows by an absolute threshold; give `absolute`")
            if self.form == "sound" and self.basis == "cached":
                raise ValueError("`basis: cached` works with `form: paper` of the null space")
            if self.projects == ("gradient" if self.form == "sound" else "both"):
                raise Mistake("projects", f"`{self.projects}` is not of `form: {self.form}`")
            if self.projects == "both" and self.basis != "original":
                raise Mistake("projects", "`both` works with `basis: original`")
        return self

    def _has(self, words: str) -> bool:
        for key, _, value in (word.partition(": ") for word in words.split(" with ")):
            given = OWN if key == "constraint" and self.own_constraint else getattr(self, key)
            if given is None or (value and given != value):
                return False
        return True

    @property
    def own_constraint(self) -> str | None:
        """The class of a constraint that is not of the package, "module:Class"."""
        return self.constraint if self.constraint and ":" in self.constraint else None

    @property
    def trains(self) -> bool:
        return self.constraint is not None

    def without_effect(self, given: Mapping[str, Any], adversary_steps: int | None) -> tuple[str, str] | None:
        """The first of the `given` settings of training that would have no effect, and why."""
        of_routers = given.keys() & {"router_multiplier", "router_weight_decay"}
        if of_routers and self.constraint == "frozen":
            return min(of_routers), "without effect here: `constraint: frozen` trains no router"
        of_adversary = given.keys() & {"adversary_rate", "adversary_restart"}
        if of_adversary and not adversary_steps:
            return min(of_adversary), "without effect here: give `adversary_steps`"
        return None

    @property
    def rule(self) -> str | None:
        """The rule of the workflow that makes the run's checkpoint; None for the original and the retrained model."""
        if self.trains:
            return "unlearn"
        if self.corrects:
            return "realign"
        edits = dict.fromkeys(("erase_words", "remove_experts"), "edit_weights")
        return {**edits, "external": "import_checkpoint"}.get(self.baseline)

    @property
    def has_bases(self) -> bool:
        """Whether `gripmoe fit-basis` fits bases to the original model's routing before training."""
        return self.basis in ("original", "cached")

    @property
    def fitted_with(self) -> str:
        """The axes that decide its bases."""
        return self.model_dump_json(include=self.FITTED_WITH)

    @property
    def expert_eps(self) -> EpsNullConfig | None:
        """The threshold of the experts' null space; None where experts move freely."""
        return self.eps_null if self.experts == "null_space" else None

    @property
    def attributes(self) -> bool:
        """Whether the method looks for the expert that serves the forget tokens most."""
        return self.experts == "top_attributed" or self.constraint == "gate_anchor"

    @property
    def looks_at_forget(self) -> bool:
        """Whether the constraint is made from the original routing of forget tokens."""
        return self.attributes or (self.has_bases and self.surface != "retain")

    @property
    def sides(self) -> frozenset[str]:
        """The tokens whose routing a null space fixes: of "retain" or "forget" documents, or of both (App. G.3)."""
        return frozenset({"retain", "forget"}) if self.surface == "combined" else frozenset({self.surface})


@functools.cache
def method_table() -> dict[str, Method]:
    """The methods that the package has, by name."""
    return read_catalogue(TABLE, Method)
