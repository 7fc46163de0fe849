"""Typed configuration of worlds, models, benchmarks, methods and runs. Unknown keys are errors; no torch here.

A `Run` is everything that one cell's training depends on, and nothing else: it is written to the cell's `run.yaml`.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from gripmoe.parsing import load_yaml, parse_as

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Precision = Literal["native", "fp8", "fp8_emulated"]  # fp8: on Hopper GPUs; emulated: anywhere, slowly
ObjectiveName = Literal["gd", "kl", "npo", "rmu"]
Optimizer = Literal["adamw", "adamw_8bit", "adamw_fp32"]  # what bf16 weights need: `gripmoe.optimizer`
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EmbeddedModel(Strict):
    """A tiny model trained here, from the embedded world."""

    source: Literal["embedded"]
    family: Literal["qwen3_moe", "qwen2_moe", "qwen3"]
    seed: int
    world_seed: int = 0
    trained_on: Literal["everything", "retain_only"] = "everything"
    oracle: Name | None = None  # the model of the same seed that never saw the forget data
    size: dict[str, PositiveInt] = {}
    max_early_steps: PositiveInt = 2000  # at most, until the model knows its facts and can name the letter of an option
    late_steps: PositiveInt = 350  # after that
    learning_rate: PositiveFloat = 1.5e-3
    required_accuracy: Fraction = 0.9  # on the questions of what it was trained on; below it nothing is measured
    allowed_without_blocks: Fraction = 0.5  # of the forget questions, by attention and embeddings alone
    attempts: PositiveInt = 3  # from `seed`, `seed` + 1000, ...: whether facts settle in experts is a matter of luck


class Sizes(Strict):
    """Numbers of parameters, for planning: all, those of the MoE blocks, those active per token; and of layers."""

    total: PositiveFloat
    blocks: PositiveFloat
    active: PositiveFloat
    layers: PositiveInt

    def held_by(self, processes: int) -> float:
        """Parameters on each of so many that share the MoE blocks and have all else."""
        return self.total - self.blocks + self.blocks / processes

    def split_over(self, gpus: int) -> float:
        """Parameters, at most, on each of so many GPUs that share the layers in order."""
        return self.total - self.blocks + self.blocks * ceil(self.layers / gpus) / self.layers


class PublishedModel(Strict):
    """A checkpoint of the hub, or a local folder of the same layout."""

    source: Literal["published"]
    id: str
    revision: str | None = None
    parameters: Sizes | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    oracle: None = None


class FinetunedModel(Strict):
    """A model of this catalogue, finetuned here on the documents of a news benchmark until it recites them."""

    source: Literal["finetuned"]
    base: Name
    benchmark: Name
    trained_on: Literal["everything", "retain_only"] = "everything"
    oracle: Name | None = None
    epochs: PositiveInt
    learning_rate: PositiveFloat
    optimizer: Optimizer = "adamw"
    batch_size: PositiveInt
    gradient_checkpointing: bool = False
    seed: int = 0
    required: Annotated[float, Field(ge=0, le=100)] = 0.0  # of VerbMem and KnowMem, on what it was trained on


ModelConfig = Annotated[EmbeddedModel | PublishedModel | FinetunedModel, Field(discriminator="source")]


class ForgetTarget(Strict):
    """Training stops at the first check at which forget accuracy on the dev split is at most this."""

    forget_accuracy: Fraction


class ReferenceTarget(Strict):
    """Training stops at the first check at which VerbMem and KnowMem of what is to be forgotten, on the dev split, are
    at most so many points above those of the retain-only model."""

    points_above_reference: NonNegative


class EmbeddedData(Strict):
    """Letter questions on invented facts, or invented news."""

    source: Literal["embedded"]
    kind: Literal["letters", "news"] = "letters"
    retain: Literal["broad", "narrow", "forms"] = "broad"  # letters: what the documents to retain hold
    world_seed: int = 0


class PublishedNews(Strict):
    """MUSE-News by hub id, or a local folder of the same layout."""

    source: Literal["muse"]
    repository: str
    revision: str | None = None
    rows: dict[str, PositiveInt] = {}  # "config/split": how many there have to be
    kind: Literal["news"] = "news"


PublishedRows = Literal[
    "forget_questions",
    "retain_questions",
    "mmlu_validation",
    "mmlu_dev",
    "forget_corpus",
    "retain_corpus",
    "truthfulqa",
]


class PublishedData(Strict):
    """Hub ids or local folders of the same schema; `revision` pins each hub id."""

    source: Literal["published"]
    kind: Literal["letters"] = "letters"
    forget_questions: str
    retain_questions: str
    forget_corpus: str
    retain_corpus: str
    truthfulqa: str = "truthfulqa/truthful_qa"
    revisions: dict[str, str] = {}
    rows: dict[PublishedRows, PositiveInt] = {}  # how many each has to have; MMLU's test split is `retain_questions`


Data = Annotated[EmbeddedData | PublishedData | PublishedNews, Field(discriminator="source")]


class Benchmark(Strict):
    """What is forgotten and retained, when it counts as forgotten, and how much of it is read at once."""

    data: Data
    target: ForgetTarget | ReferenceTarget
    retain_documents: PositiveInt  # of the retain corpus, for bases and for Method B
    # Of a document in tokens. Letters: the rest is left out; news: it becomes further documents.
    max_length: PositiveInt
    evaluation_batch_size: PositiveInt
    few_shot_questions: PositiveInt = 100  # letters: of the retain questions, asked below five solved ones
    rewrites: dict[Name, str] = {}  # letters: files of prompts, {"id", "prompt"} a line, for the prompt attacks
    strip_prompts: bool = False  # news: without the space that ends KnowMem's prompts

    @model_validator(mode="after")
    def _target_of_its_kind(self) -> Benchmark:
        wanted = ReferenceTarget if self.is_news else ForgetTarget
        if not isinstance(self.target, wanted):
            raise ValueError(f"`target` of {self.data.kind} is given by `{next(iter(wanted.model_fields))}`")
        return self

    @property
    def is_news(self) -> bool:
        return self.data.kind == "news"

    @property
    def reading(self) -> dict[str, Any]:
        """How its corpora become rows of tokens."""
        return {"max_length": self.max_length, "whole": self.is_news}


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
    loss_bound: PositiveFloat  # a retain loss above it, or no number, ends the run as diverged
    trained_layers: PositiveInt | None = None  # MoE blocks: the last so many that the losses look at; all if absent
    objective: dict[str, int | float] = {}
    alpha_multiplier: PositiveFloat = 1.0  # of the objective's retain weight

    @model_validator(mode="after")
    def _checkpoints_at_checks(self) -> Training:
        if self.checkpoint_every % self.check_every:
            raise ValueError("`checkpoint_every` must be a multiple of `check_every`")
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
    safety_margin: NonNegative = 1e-3
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
        if (self.constraint == "null_space") != (self.eps_null is not None and self.basis is not None):
            raise ValueError("`constraint: null_space` needs `eps_null` and `basis`, no other constraint has them")
        if self.constraint == "null_space" and self.form == "paper" and self.basis != "minibatch":
            raise ValueError("`form: paper` of the null space works with `basis: minibatch`")
        if self.max_rank and (self.constraint != "null_space" or self.form == "paper"):
            raise ValueError("`max_rank` is a choice of `constraint: null_space` in its sound form")
        if self.surface != "retain" and self.basis != "original":
            raise ValueError("`surface` is a choice of `basis: original`")
        return self

    @property
    def trains(self) -> bool:
        return self.constraint is not None

    @property
    def has_bases(self) -> bool:
        return self.basis == "original"


class Artefact(Strict):
    """A table or figure: `notebooks/<name>.ipynb` renders it into these formats."""

    formats: list[Literal["csv", "tex", "pdf", "png"]] = Field(min_length=1)


class World(Strict):
    """What to run. Training is changed by `objective_training`, then on a benchmark by `benchmark_training` (under all
    objectives, then under one), then by the method, then by `overrides` for a method or for "objective/method"."""

    models: list[Name] = Field(min_length=1)
    benchmarks: list[Name] = Field(min_length=1)
    objectives: list[ObjectiveName] = Field(min_length=1)
    methods: list[Name] = Field(min_length=1)  # under every objective
    extra_methods: dict[ObjectiveName, list[Name]] = {}  # under one objective only
    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    training: Training
    objective_training: dict[ObjectiveName, dict[str, Any]]
    benchmark_training: dict[Name, dict[Literal["all"] | ObjectiveName, dict[str, Any]]] = {}
    overrides: dict[str, dict[str, Any]] = {}
    relearning: Relearning | None = None  # an attack that is left out without it
    gpus: dict[Name, PositiveInt] = {}  # that a model takes: a process each trains it; one if it is not named
    artefacts: list[Name]

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
    benchmark: Benchmark
    objective: str
    method_name: Name
    method: Method
    seed: int
    training: Training | None


def load_run(path: Path) -> Run:
    return parse_as(Run, load_yaml(path), path)
