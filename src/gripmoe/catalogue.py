"""What the catalogues of models and benchmarks may say, typed. Unknown keys are errors; no torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

NAME = r"^[a-z][a-z0-9_]*$"
Name = Annotated[str, Field(pattern=NAME)]
Optimizer = Literal["adamw", "adamw_8bit", "adamw_fp32"]  # what bf16 weights need: `gripmoe.optimizer`
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EmbeddedSize(Strict):
    """Of a tiny model."""

    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    head_dim: PositiveInt = 16
    num_experts: PositiveInt = 16
    top_k: PositiveInt = 4
    expert_width: PositiveInt = 64

    @model_validator(mode="after")
    def _experts_to_choose_from(self) -> EmbeddedSize:
        if self.top_k > self.num_experts:
            raise ValueError(f"`top_k` {self.top_k} exceeds `num_experts` {self.num_experts}")
        return self


class EmbeddedModel(Strict):
    """A tiny model trained here, from the embedded world."""

    source: Literal["embedded"]
    family: Literal["qwen3_moe", "qwen2_moe", "qwen3"]
    seed: int
    world_seed: int = 0
    trained_on: Literal["everything", "retain_only"] = "everything"
    oracle: Name | None = None  # never saw the forget data; of the same seed, if none was refused
    size: EmbeddedSize = EmbeddedSize()
    max_early_steps: PositiveInt = 2000  # at most, until the model knows its facts and can name the letter of an option
    late_steps: PositiveInt = 350  # after that
    learning_rate: PositiveFloat = 1.5e-3
    required_accuracy: Fraction = 0.9  # on the questions of what it was trained on; below it nothing is measured
    allowed_without_blocks: Fraction = 0.5  # of the forget questions, by attention and embeddings alone
    attempts: PositiveInt = 3  # from `seed`, `seed` + 1000, ...: whether facts settle in experts is a matter of luck

    @property
    def layers(self) -> int:
        return self.size.num_layers


class PublishedModel(Strict):
    """A checkpoint of the hub, or a local folder of the same layout."""

    source: Literal["published"]
    id: str
    revision: str | None = None
    config: dict[str, Any] | None = None  # its dimensions, as its config.json has them: for plans without a network
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    oracle: None = None

    @property
    def layers(self) -> int | None:
        """None where its row does not say."""
        return self.config and self.config["num_hidden_layers"]


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


def _kind_of_target(value: Any) -> str:
    keys = value if isinstance(value, dict) else type(value).model_fields
    return "ReferenceTarget" if any("reference" in key for key in keys) else "ForgetTarget"


Target = Annotated[
    Annotated[ForgetTarget, Tag("ForgetTarget")] | Annotated[ReferenceTarget, Tag("ReferenceTarget")],
    Discriminator(_kind_of_target),
]


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
    forget_subject: str = "cybersecurity"  # as prompts name it: "... questions (with answers) about ..."
    revisions: dict[str, str] = {}
    rows: dict[PublishedRows, PositiveInt] = {}  # how many each has to have; MMLU's test split is `retain_questions`


Data = Annotated[EmbeddedData | PublishedData | PublishedNews, Field(discriminator="source")]


class Task(Strict):
    """What is forgotten and retained, and when it counts as forgotten: all that training reads of a benchmark."""

    data: Data
    target: Target
    retain_documents: PositiveInt  # of the retain corpus, for bases and for Method B
    # Of a document in tokens. Letters: the rest is left out; news: it becomes further documents.
    max_length: PositiveInt
    strip_prompts: bool = False  # news: without the space that ends KnowMem's prompts

    @model_validator(mode="after")
    def _target_of_its_kind(self) -> Task:
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


class Benchmark(Task):
    """A task and how it is measured; what stands here changes no trained model."""

    evaluation_batch_size: PositiveInt
    few_shot_questions: PositiveInt = 100  # letters: of the retain questions, asked below five solved ones
    rewrites: dict[Name, str] = {}  # letters: files of prompts, {"id", "prompt"} a line, for the prompt attacks

    @property
    def task(self) -> Task:
        return Task(**{name: getattr(self, name) for name in Task.model_fields})
