"""Typed configuration of worlds, methods and runs. Unknown keys are errors; no torch here.

A `Run` is everything that one cell's training depends on, and nothing else: it is written to the cell's `run.yaml`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from gripmoe.catalogue import Fraction, Name, NonNegative, Optimizer, Strict, Task
from gripmoe.files import read_yaml
from gripmoe.parsing import parse_as

Precision = Literal["native", "fp8", "fp8_emulated"]  # fp8: on Hopper GPUs; emulated: anywhere, slowly
LinearPrecision = Literal["native", "te_fp8"]  # te_fp8: by TransformerEngine, on Ada or Hopper GPUs
ObjectiveName = Literal["gd", "kl", "npo", "rmu"]


def _each_once(values: list) -> list:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} stands twice; leave one out")
    return values


Names = Annotated[list[Name], AfterValidator(_each_once)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class EpsNullConfig(Strict):
    value: PositiveFloat
    kind: Literal["absolute", "relative", "energy"]
    bands: dict[Literal["early", "middle", "late"], PositiveFloat] = {}  # thirds of the layers with their own


class RetainWeight(Strict):
    """What GD and KL ask for: the weight of the retain loss."""

    alpha: NonNegative


class PreferenceSettings(RetainWeight):
    """NPO's."""

    beta: PositiveFloat


class RepresentationSettings(RetainWeight):
    """RMU's: the layer, and the length of the target, relative to retain states or absolute."""

    layer: Annotated[int, Field(ge=0)]
    kappa: PositiveFloat | None = None
    steering: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one_length(self) -> RepresentationSettings:
        if (self.kappa is None) == (self.steering is None):
            raise ValueError("give one of `kappa` (relative) and `steering` (the absolute c)")
        return self


OBJECTIVE_SETTINGS = {
    "gd": RetainWeight,
    "kl": RetainWeight,
    "npo": PreferenceSettings,
    "rmu": RepresentationSettings,
}


class Training(Strict):
    """Every hyperparameter of an unlearning run; provenance of each value stands beside it in the world file."""

    learning_rate: PositiveFloat
    router_multiplier: NonNegative  # learning rate of the routers, as a multiple
    betas: tuple[Fraction, Fraction]
    adam_epsilon: PositiveFloat
    optimizer: Optimizer = "adamw"
    weight_decay: NonNegative
    router_weight_decay: NonNegative
    clip_norm: PositiveFloat
    forget_batch_size: PositiveInt
    retain_batch_size: PositiveInt
    max_steps: PositiveInt
    check_every: PositiveInt
    checkpoint_every: PositiveInt
    gradient_checkpointing: bool = False  # activations are computed again in the backward pass, for large models
    expert_precision: Precision = "native"  # of the experts' products in training steps; the paper: fp8
    linear_precision: LinearPrecision = "native"  # of nn.Linear layers in training steps; the paper: te_fp8
    loss_bound: PositiveFloat  # a retain loss above it, or no number, ends the run as diverged
    trained_layers: PositiveInt | None = None  # MoE blocks: the last so many that the losses look at; all if absent
    # RMU: the layers after its own, which only checks run. In host memory they come to the GPU one by one.
    idle_layers: Literal["resident", "host"] = "resident"
    objective: dict[str, int | float] = {}
    alpha_multiplier: PositiveFloat = 1.0  # of the objective's retain weight

    @model_validator(mode="after")
    def _checkpoints_at_checks(self) -> Training:
        if self.checkpoint_every % self.check_every:
            raise ValueError("`checkpoint_every` must be a multiple of `check_every`")
        if self.max_steps % self.check_every:
            raise ValueError("`max_steps` must be a multiple of `check_every`: the last steps are to be checked too")
        return self


class Relearning(Strict):
    """Finetuning as an attack: all parameters train."""

    learning_rate: PositiveFloat
    optimizer: Optimizer = "adamw"
    batch_size: PositiveInt = 16
    gradient_checkpointing: bool = False


class Method(Strict):
    """Independent axes; a named row of methods.yaml is one point in their space."""

    reference: Literal["original", "retain_only"] | None = None  # nothing is trained
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
        kinds = [self.reference is not None, self.constraint is not None, self.corrects is not None]
        if sum(kinds) != 1:
            raise ValueError("give exactly one of `reference`, `constraint`, `corrects`")
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
    def looks_at_passes(self) -> bool:
        """Whether its constraint looks at training passes, through all layers."""
        return not (self.constraint in ("none", "frozen") or self.has_bases)


class Artefact(Strict):
    """A table or figure: `notebooks/<name>.ipynb` renders it into these formats."""

    formats: list[Literal["csv", "tex", "html", "md", "pdf", "png"]] = Field(min_length=1)


class World(Strict):
    """What to run. Training is changed by `objective_training`, then on a benchmark by `benchmark_training` (under all
    objectives, then under one), then by the method, then by `overrides` for a method or for "objective/method"."""

    models: Names = Field(min_length=1)
    benchmarks: Names = Field(min_length=1)
    objectives: Annotated[list[ObjectiveName], AfterValidator(_each_once)] = Field(min_length=1)
    methods: Names = Field(min_length=1)  # under every objective
    extra_methods: dict[ObjectiveName, Names] = {}  # under one objective only
    seeds: Annotated[list[Seed], AfterValidator(_each_once)] = Field(min_length=1)
    training: Training
    objective_training: dict[ObjectiveName, dict[str, Any]]
    benchmark_training: dict[Name, dict[Literal["all"] | ObjectiveName, dict[str, Any]]] = {}
    overrides: dict[str, dict[str, Any]] = {}
    relearning: Relearning | None = None  # an attack that is left out without it
    reference_memory: PositiveInt = 8  # GB of host memory for what a run asks of the original model; more goes to disk
    basis_memory: PositiveInt = 16  # GB of each GPU for Method A's bases
    # GB of host memory, of each process, for what goes beyond it and is copied in every step; yet more is read
    basis_host_memory: Annotated[int, Field(ge=0)] = 64
    gpus: dict[Name, PositiveInt] = {}  # that a model takes: a process each trains it; one if it is not named
    nodes: dict[Name, PositiveInt] = {}  # over which these GPUs are spread evenly; one if it is not named
    artefacts: Names

    @property
    def all_methods(self) -> list[str]:
        """Every method that any objective has, once."""
        extra = [name for names in self.extra_methods.values() for name in names]
        return list(dict.fromkeys([*self.methods, *extra]))

    def methods_of(self, objective: str) -> list[str]:
        return list(dict.fromkeys([*self.methods, *self.extra_methods.get(objective, [])]))


class Run(Strict):
    """One cell, completely resolved."""

    model: Name
    benchmark_name: Name
    benchmark: Task
    objective: str
    method_name: Name
    method: Method
    seed: int
    training: Training | None


def load_run(path: Path) -> Run:
    return parse_as(Run, read_yaml(path), path)
