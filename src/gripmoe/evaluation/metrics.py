"""Answers to flat metrics and to per-question rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gripmoe.data.prompt_formats import LETTERS
from gripmoe.evaluation.questions import Answer
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_csv


def choice_metrics(questions: Sequence[dict], answers: Sequence[Answer]) -> dict[str, float]:
    """Forget and retain accuracy, in all and by what unlearning saw; and how often each letter is chosen on forget
    questions: an accuracy of .25 can mean "always A"."""
    pairs = list(zip(questions, answers, strict=True))

    def mean(keep: Callable[[dict], bool]) -> float:
        kept = [answer.correct for question, answer in pairs if keep(question)]
        return sum(kept) / len(kept) if kept else float("nan")

    is_forget = lambda question: question["exposure"] == "forget"  # noqa: E731
    metrics = {
        "forget_accuracy": mean(is_forget),
        "retain_accuracy": mean(lambda q: not is_forget(q)),
        "num_forget_questions": sum(is_forget(q) for q in questions),
        "num_retain_questions": sum(not is_forget(q) for q in questions),
    }
    for wording in ("seen", "held_out"):
        metrics[f"forget_accuracy_{wording}_wording"] = mean(lambda q, w=wording: is_forget(q) and q["wording"] == w)
    for exposure in ("seen", "unseen_entity", "unseen_subject"):
        metrics[f"retain_accuracy_{exposure}"] = mean(lambda q, e=exposure: q["exposure"] == e)
    chosen = [answer.chosen for question, answer in pairs if is_forget(question)]
    for number, letter in enumerate(LETTERS):
        metrics[f"forget_answers_{letter}"] = chosen.count(number) / len(chosen)
    return metrics


def question_results(questions: Sequence[dict], answers: Sequence[Answer]) -> list[dict]:
    """One row per question, with the letter chosen and the log-likelihood of each letter."""
    return [
        {
            "id": question["id"],
            "fact": question["fact"],
            "subject": question["subject"],
            "exposure": question["exposure"],
            "wording": question["wording"],
            "answer": question["answer"],
            "chosen": answer.chosen,
            "correct": int(answer.correct),
            **{
                f"logprob_{letter}": round(value, 6)
                for letter, value in zip(LETTERS, answer.letter_logprobs, strict=True)
            },
        }
        for question, answer in zip(questions, answers, strict=True)
    ]


def load_answers(path: Path, questions: Sequence[dict]) -> list[Answer]:
    """The answers to `questions`, in their order, from a file of rows. Raises ConfigError if one is missing."""
    rows = {row["id"]: row for row in read_csv(path)}
    missing = [question["id"] for question in questions if question["id"] not in rows]
    if missing:
        raise ConfigError(f"{path}: no answer to question {missing[0]!r} and {len(missing) - 1} others; evaluate again")
    return [
        Answer(
            question["id"],
            int(row["chosen"]),
            row["correct"] == "1",
            tuple(float(row[f"logprob_{letter}"]) for letter in LETTERS),
        )
        for question in questions
        for row in (rows[question["id"]],)
    ]
