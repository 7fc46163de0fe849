"""From answers to metrics, and to one row per question."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from gripmoe.config.benchmarks import Benchmark
from gripmoe.data.prompt_formats import LETTERS
from gripmoe.evaluation.questions import Answer, accuracy
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_csv
from gripmoe.io.imports import imported

COLUMNS = ("id", "fact", "subject", "exposure", "wording", "answer")  # keys of a question


def choice_metrics(questions: Sequence[dict], answers: Sequence[Answer]) -> dict[str, float]:
    """Forget and retain accuracy, and retain accuracy on the subjects that unlearning never sees (NaN if the questions
    are about none)."""

    def over(exposures: Collection[str]) -> float:
        asked = zip(questions, answers, strict=True)
        kept = [answer for question, answer in asked if question["exposure"] in exposures]
        return accuracy(kept) if kept else float("nan")

    return {
        "forget_accuracy": over({"forget"}),
        "retain_accuracy": over({question["exposure"] for question in questions} - {"forget"}),
        "retain_accuracy_unseen_subject": over({"unseen_subject"}),
    }


def own_metrics(benchmark: Benchmark) -> dict[str, Callable]:
    """The user's functions that the benchmark's row names. Raises ConfigError if one is missing, or takes other
    arguments than a model, its tokenizer and the folder of data."""
    own = {name: imported(path, f"benchmarks.yaml: metrics.{name}") for name, path in benchmark.metrics.items()}
    for name, metric in own.items():
        try:
            inspect.signature(metric).bind(None, None, None)
        except ValueError:  # what is not written in Python may have no signature
            continue
        except TypeError as error:
            where = f"benchmarks.yaml: metrics.{name}"
            raise ConfigError(f"{where}: {error}; let it take a model, its tokenizer and the folder of data") from None
    return own


def as_number(key: str, value: Any) -> float:
    """What a metric or an attack of the user returns, which `key` of a benchmark names. Raises ConfigError if it is no
    number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise ConfigError(f"benchmarks.yaml: {key}: the function returned a {kind}; return a number") from None


def require_other_names(own: Collection[str], metrics: Collection[str]) -> None:
    """Raises ConfigError if a metric of the user has the name of one of the package."""
    for name in set(own) & set(metrics):
        raise ConfigError(f"benchmarks.yaml: metrics.{name}: the package has a metric of this name; give yours another")


def question_results(questions: Sequence[dict], answers: Sequence[Answer]) -> list[dict]:
    """One row per question, with the letter chosen and the log-likelihood of each letter."""
    rows = []
    for question, answer in zip(questions, answers, strict=True):
        row = {name: question[name] for name in COLUMNS} | {"chosen": answer.chosen, "correct": int(answer.correct)}
        logprobs = zip(LETTERS, answer.letter_logprobs, strict=True)
        rows.append(row | {f"logprob_{letter}": round(value, 6) for letter, value in logprobs})
    return rows


def load_answers(path: Path, questions: Sequence[dict]) -> list[Answer]:
    """The answers to `questions`, in their order, from a file of rows. Raises ConfigError if one is missing."""
    rows = {row["id"]: row for row in read_csv(path)}
    if missing := [question["id"] for question in questions if question["id"] not in rows]:
        others = f" and {len(missing) - 1} others" if missing[1:] else ""
        raise ConfigError(f"{path}: no answer to question {missing[0]!r}{others}; evaluate again")
    return [_answer(rows[question["id"]]) for question in questions]


def _answer(row: dict[str, str]) -> Answer:
    logprobs = tuple(float(row[f"logprob_{letter}"]) for letter in LETTERS)
    return Answer(row["id"], int(row["chosen"]), row["correct"] == "1", logprobs)
