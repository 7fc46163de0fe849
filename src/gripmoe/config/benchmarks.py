"""What benchmarks.yaml may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    model_validator,
)

from gripmoe.config.types import Fraction, Name, NonNegative, Strict


class ForgetTarget(Strict):
    """Training stops at the first check at which forget accuracy on the dev split is at most this."""

    forget_accuracy: Fraction


class RetrainedTarget(Strict):
    """Training stops at the first check at which VerbMem and KnowMem of what is to be forgotten, on the dev split, are
    at most so many points above those of the retain-only model."""

    points_above_retrained: NonNegative


def _kind_of_target(value: Any) -> str:
    keys = value if isinstance(value, dict) else type(value).model_fields
    return "RetrainedTarget" if any("retrained" in key for key in keys) else "ForgetTarget"


Target = Annotated[
    Annotated[ForgetTarget, Tag("ForgetTarget")] | Annotated[RetrainedTarget, Tag("RetrainedTarget")],
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
        wanted = RetrainedTarget if self.is_news else ForgetTarget
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
