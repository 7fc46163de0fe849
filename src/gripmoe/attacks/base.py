"""Input (`Setting`) and result (`Found`) of an attack. An attack is a function of a `Setting`. `run.py` has the default
attacks; a benchmark's row may name more."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import exp
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.training import Relearning
from gripmoe.data.corpora import load_corpus
from gripmoe.data.documents import Row, collate, encode_all, length_buckets
from gripmoe.data.muse import CONTEXT
from gripmoe.evaluation.muse import News, knowledge_memory
from gripmoe.evaluation.questions import Answer, direct_answers, load_questions, prompt_of
from gripmoe.geometry.routing import RoutingTrace
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel

Scores = Sequence[float]  # one per item, in order: right (1) or wrong (0), or the score of a text
SAMPLE = 240  # forget questions for attacks with many evaluations: a standard error of 0.03 near chance
RETAIN_SAMPLE = 1000  # retain questions under forced experts
PAIRS = 100  # news: forget pairs for attacks with many evaluations


@dataclass(frozen=True)
class Found:
    """Metrics by name. For a metric that is a mean over items, also the score of each item by id; and for letter
    questions, the answers: the number of the chosen letter, and its probability."""

    metrics: dict[str, float] = field(default_factory=dict)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    answers: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)

    @classmethod
    def over(cls, ids: Sequence[str], scores: Mapping[str, Scores], **others: float) -> Found:
        """A result with `scores` of the items `ids`, their means as metrics, and `others`, which are not means. Raises
        ConfigError if a metric has another number of scores than there are items."""
        for name, values in scores.items():
            if len(values) != len(ids):
                raise ConfigError(f"metric {name!r} has {len(values)} scores for {len(ids)} items; give one for each")
        by_id = {name: dict(zip(ids, map(float, values), strict=True)) for name, values in scores.items()}
        given = {
            name: dict(zip(ids, values.given, strict=True))
            for name, values in scores.items()
            if isinstance(values, QuestionScores)
        }
        return cls({**{name: mean(values) for name, values in scores.items()}, **others}, by_id, given)

    @classmethod
    def joined(cls, found: Iterable[Found]) -> Found:
        """All of `found` as one. Raises ConfigError if two have a metric of the same name."""
        whole = cls()
        for part in found:
            if taken := sorted(whole.metrics.keys() & part.metrics.keys()):
                raise ConfigError(f"two attacks return the metric {taken[0]!r}; give that of yours another name")
            whole.metrics.update(part.metrics)
            whole.scores.update(part.scores)
            whole.answers.update(part.answers)
        return whole


@dataclass
class Setting:
    """A run under attack. Without `finetuning`, relearning is skipped. Subclasses define a sample of test items that is
    the same for every run: their `ids`, and `scores_of(model)`, those of a model on them; and `prompts`, those of dev
    items, which the attacker may look at."""

    before: MoEModel  # the original model
    after: MoEModel  # the unlearned model
    tokenizer: object
    data: Path
    benchmark: Benchmark
    seed: int = 0
    finetuning: Relearning | None = None

    def found(self, scores: Mapping[str, Scores], **others: float) -> Found:
        """`Found.over` the items that `scores_of` scores."""
        return Found.over(self.ids, scores, **others)

    def corpus(self, name: str) -> list[Row]:
        return load_corpus(self.data / f"{name}_corpus.jsonl", self.tokenizer, **self.benchmark.reading)


@dataclass
class QuestionSetting(Setting):
    """A setting of letter questions. `known_answers(questions)` returns answers of the unlearned model, if there are
    any."""

    known_answers: Callable[[Sequence[dict]], list[Answer]] | None = None

    @cached_property
    def forget(self) -> list[dict]:
        return load_questions(self.data / "forget_questions.jsonl", "test")

    @cached_property
    def own_answers(self) -> list[Answer]:
        """The unlearned model's answers to the forget questions, without an attack."""
        return (self.known_answers or partial(self.ask, self.after))(self.forget)

    @cached_property
    def dev(self) -> list[dict]:
        """Forget questions about other facts than those of the test split."""
        return load_questions(self.data / "forget_questions.jsonl", "dev")

    @cached_property
    def retain(self) -> list[dict]:
        questions = load_questions(self.data / "retain_questions.jsonl", "test")
        return random.Random(0).sample(questions, min(RETAIN_SAMPLE, len(questions)))

    @cached_property
    def sample(self) -> list[dict]:
        return sample_of(self.forget)

    @property
    def ids(self) -> list[str]:
        return [question["id"] for question in self.sample]

    @property
    def prompts(self) -> list[str]:
        return [prompt_of(question) for question in self.dev]

    def ask(self, model: MoEModel, questions: Sequence[dict], prompt=None) -> list[Answer]:
        return direct_answers(model.model, self.tokenizer, questions, prompt=prompt)

    def right(self, model: MoEModel, questions: Sequence[dict], prompt=None) -> Scores:
        return QuestionScores(self.ask(model, questions, prompt))

    def scores_of(self, model: MoEModel) -> Scores:
        return self.right(model, self.sample)


@dataclass
class NewsSetting(Setting):
    """A setting of MUSE's news. The sample consists of KnowMem's forget pairs."""

    @cached_property
    def news(self) -> News:
        return News.load(self.data)

    @property
    def pairs(self) -> list[dict]:
        return self.news.pairs("forget", "test")[:PAIRS]

    @property
    def ids(self) -> list[str]:
        return [pair["id"] for pair in self.pairs]

    @property
    def prompts(self) -> list[str]:
        return [row["prompt"] for row in self.news.prompts("dev")]

    def scores_of(self, model: MoEModel) -> Scores:
        context = self.news.pairs("forget", CONTEXT)
        return list(knowledge_memory(model.model, self.tokenizer, self.pairs, context).values())


class QuestionScores(list[float]):
    """Scores of `answers`: right (1) or wrong (0)."""

    def __init__(self, answers: Sequence[Answer]):
        super().__init__(float(answer.correct) for answer in answers)
        self.answers = answers

    @property
    def given(self) -> list[tuple[int, float]]:
        """For each answer, the number of the chosen letter and its probability."""
        return [(each.chosen, round(exp(each.letter_logprobs[each.chosen]), 4)) for each in self.answers]


def sample_of(questions: Sequence[dict]) -> list[dict]:
    """The questions that attacks with many evaluations ask."""
    return random.Random(0).sample(questions, min(SAMPLE, len(questions)))


def mean(scores: Scores) -> float:
    """The mean of the scores; NaN without scores."""
    return fmean(scores) if scores else float("nan")


def highest(found: Iterable[Scores]) -> Scores:
    """The scores with the highest mean."""
    return max(found, key=mean)


def routing_of(model: MoEModel, tokenizer, prompts: Sequence[str]) -> Iterator[RoutingTrace]:
    """How `model` routes the tokens of the prompts, one batch after the other: the router inputs of all batches in all
    layers may not fit in memory."""
    rows = encode_all(tokenizer, (("", [(prompt, False)]) for prompt in prompts))
    return model.traced([collate(bucket, tokenizer.pad_token_id) for bucket in length_buckets(rows)])


def expert_usage(model: MoEModel, tokenizer, prompts: Sequence[str]) -> dict[int, Tensor]:
    """The share of each expert among all selections of the prompts' tokens, (E,) by layer."""
    counts: Counter[int] = Counter()
    for trace in routing_of(model, tokenizer, prompts):
        for layer, seen in trace.items():
            counts[layer] += torch.bincount(seen.top_k_Nk.flatten(), minlength=model.num_experts).double()
    return {layer: count_E / count_E.sum() for layer, count_E in counts.items()}


def score_spread(model: MoEModel, tokenizer, prompts: Sequence[str]) -> dict[int, float]:
    """The standard deviation by layer of all router scores of the prompts' tokens."""
    sums: Counter[int] = Counter()  # of ones, scores and their squares
    for trace in routing_of(model, tokenizer, prompts):
        for layer, seen in trace.items():
            scores = seen.scores_NE.double()
            sums[layer] += torch.stack([torch.ones_like(scores).sum(), scores.sum(), scores.square().sum()])
    return {
        layer: ((squares - total**2 / count) / (count - 1)).sqrt().float().item()
        for layer, (count, total, squares) in sums.items()
    }


def by_item(found: Found) -> list[dict]:
    """One row per item, with its score under each attack; empty if the attack did not use the item."""
    ids = dict.fromkeys(item for scores in found.scores.values() for item in scores)
    return [{"id": item, **{name: scores.get(item, "") for name, scores in found.scores.items()}} for item in ids]
