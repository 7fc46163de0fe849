"""What benchmarks.yaml may say."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from gripmoe.config.reading import Mistake
from gripmoe.config.types import CodePath, Name, NonNegative, Strict


class EmbeddedData(Strict):
    """Letter questions on invented facts, or invented news."""

    source: Literal["embedded"]
    kind: Literal["letters", "news"] = "letters"
    retain: Literal["broad", "narrow", "forms"] = "broad"  # letters: what the documents to retain hold
    world_seed: int = 0
    sources: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _retain_of_letters(self) -> EmbeddedData:
        if self.kind == "news" and self.retain != "broad":
            raise Mistake("retain", "without effect on news; leave it out")
        return self


NewsRows = Literal[
    "knowmem/forget_qa", "knowmem/retain_qa", "knowmem/forget_qa_icl", "knowmem/retain_qa_icl", "verbmem/forget",
    "privleak/forget", "privleak/retain", "privleak/holdout", "raw/forget", "raw/retain1", "raw/retain2",
]  # fmt: skip


class PublishedNews(Strict):
    """MUSE-News by hub id, or a local folder of the same layout."""

    source: Literal["muse"]
    repository: str  # hub id or folder
    revision: str | None = None  # a commit of the hub
    rows: dict[NewsRows, PositiveInt] = {}  # how many there have to be
    kind: Literal["news"] = "news"

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.repository,)


PublishedRows = Literal[
    "forget_questions", "retain_questions", "mmlu_validation", "mmlu_dev",
    "forget_corpus", "retain_corpus", "truthfulqa",
]  # fmt: skip


class PublishedData(Strict):
    """Hub ids or local folders of the same schema; `revision` pins each hub id."""

    source: Literal["published"]
    kind: Literal["letters"] = "letters"
    forget_questions: str  # hub id or folder, as the four below
    retain_questions: str
    forget_corpus: str
    retain_corpus: str
    truthfulqa: str = "truthfulqa/truthful_qa"
    forget_subject: str = "cybersecurity"  # as prompts name it: "... questions (with answers) about ..."
    revisions: dict[str, str] = {}  # commits of the hub, by hub id
    rows: dict[PublishedRows, PositiveInt] = {}  # how many each has to have; MMLU's test split is `retain_questions`

    @property
    def sources(self) -> tuple[str, ...]:
        """Each hub id or folder once."""
        names = ("forget_questions", "retain_questions", "forget_corpus", "retain_corpus", "truthfulqa")
        return tuple(dict.fromkeys(getattr(self, name) for name in names))


Data = Annotated[EmbeddedData | PublishedData | PublishedNews, Field(discriminator="source")]


class Documents(Strict):
    """The documents of a benchmark, and how they are read: what tracing and finetuning need of it."""

    data: Data  # where questions and documents come from
    retain_documents: PositiveInt  # of the retain corpus, for bases and for Method B
    # Tokens of a document. Of letters, the rest of a longer document is left out; of news, it makes further documents.
    max_length: PositiveInt

    @property
    def is_news(self) -> bool:
        return self.data.kind == "news"

    @property
    def reading(self) -> dict[str, Any]:
        """How its corpora become rows of tokens."""
        return {"max_length": self.max_length, "whole": self.is_news}


class Task(Documents):
    """What is forgotten and retained, and when it counts as forgotten: all that training reads of a benchmark."""

    # Training stops after `checks_to_stop` checks in a row whose dev questions reach it. Letters: forget accuracy is at
    # most this. News: VerbMem and KnowMem of the forget documents are at most so many points above those of the
    # retrained model.
    target: dict[Literal["forget_accuracy", "points_above_retrained"], NonNegative]

    @model_validator(mode="after")
    def _target_of_its_kind(self) -> Task:
        wanted = "points_above_retrained" if self.is_news else "forget_accuracy"
        if list(self.target) != [wanted]:
            raise ValueError(f"`target` of {self.data.kind} is given by `{wanted}`")
        if not self.is_news and self.target[wanted] > 1:
            raise Mistake(f"target.{wanted}", f"Input should be less than or equal to 1 (got {self.target[wanted]:g})")
        return self


class Benchmark(Task):
    """A task and how it is measured; what stands here changes no trained model."""

    evaluation_batch_size: PositiveInt = 8  # prompts in one forward pass of lm-evaluation-harness
    few_shot_questions: PositiveInt = 100  # letters: of the retain questions, asked below five solved ones
    rewrites: dict[Name, str] = {}  # letters: files of prompts, {"id", "prompt"} a line, for the prompt attacks
    # Functions of your own, "module:function" by name. An attack takes a `gripmoe.attacks.base.Setting` and returns a
    # `Found`. A metric takes a model, its tokenizer and the folder of the benchmark's data, and returns a number.
    attacks: dict[Name, CodePath] = {}
    metrics: dict[Name, CodePath] = {}

    @model_validator(mode="after")
    def _keys_of_its_kind(self) -> Benchmark:
        for key in ("few_shot_questions", "rewrites") if self.is_news else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise Mistake(key, "without effect on news, which has no letter questions; leave it out")
        return self

    @property
    def measured(self) -> Benchmark:
        """The benchmark without `rows` of its data, which are checked where data is prepared, and change nothing."""
        rows = {"rows": {}} if self.data.sources else {}
        return self.model_copy(update={"data": self.data.model_copy(update=rows)})

    @property
    def task(self) -> Task:
        return Task(**{name: getattr(self.measured, name) for name in Task.model_fields})

    @property
    def documents(self) -> Documents:
        return Documents(**{name: getattr(self.measured, name) for name in Documents.model_fields})
