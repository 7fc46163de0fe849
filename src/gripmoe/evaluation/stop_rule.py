"""The stop rule: when a run has forgotten enough, measured on the dev split alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gripmoe.config.benchmarks import Task
from gripmoe.evaluation.muse import News, mean_score, news_scores
from gripmoe.evaluation.questions import accuracy, direct_answers, load_questions
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json
from gripmoe.moe import MoEModel

RETAIN_QUESTIONS = 120  # of the dev split, asked at every check
RETAIN_PAIRS = 40  # the same for news


@dataclass(frozen=True)
class StopRule:
    """A model has forgotten when each of its `scores` that has a target is at most this target."""

    targets: dict[str, float]
    scores: Callable[[MoEModel], dict[str, float]]

    def met(self, history: Sequence[Mapping[str, float]], checks: int) -> bool:
        """Whether all of the last `checks` entries of a history meet the targets."""
        last = history[-checks:]
        return len(last) == checks and all(entry[name] <= self.targets[name] for entry in last for name in self.targets)


def stop_rule(benchmark: Task, data: Path, retrained: Path | None, tokenizer) -> StopRule:
    """The stop rule of a benchmark, on its dev items. The target of letter questions is a fixed forget accuracy. The
    targets of news are VerbMem and KnowMem a few points above those in `retrained`, the description of the retrained
    model. Raises ConfigError if that lacks them, or if no letter question is in the dev split."""
    if benchmark.is_news:
        news, known = News.load(data), read_json(retrained) if retrained else {}
        if absent := {"verbmem", "knowmem_forget"} - known.keys():
            raise ConfigError(
                f"{retrained or '--retrained'}: {min(absent)} of the retrained model is needed, a few points above "
                "which a run has forgotten; name one that was finetuned on the benchmark's documents to retain"
            )
        margin = benchmark.target["points_above_retrained"]
        retain = [pair["id"] for pair in news.pairs("retain", "dev")]
        left_out = set(retain[RETAIN_PAIRS:])
        sample = replace(news, knowmem=[pair for pair in news.knowmem if pair["id"] not in left_out])

        def news_means(moe: MoEModel) -> dict[str, float]:
            scores = news_scores(moe.model, tokenizer, sample, "dev")
            return {name: mean_score(items) for name, items in scores.items()}

        return StopRule({name: known[name] + margin for name in ("verbmem", "knowmem_forget")}, news_means)

    dev = {name: load_questions(data / f"{name}_questions.jsonl", "dev") for name in ("forget", "retain")}
    # At random, because files have questions of a subject together.
    dev["retain"] = random.Random(0).sample(dev["retain"], min(RETAIN_QUESTIONS, len(dev["retain"])))

    def accuracies(moe: MoEModel) -> dict[str, float]:
        return {f"{name}_accuracy": accuracy(direct_answers(moe.model, tokenizer, dev[name])) for name in dev}

    return StopRule({"forget_accuracy": benchmark.target["forget_accuracy"]}, accuracies)
