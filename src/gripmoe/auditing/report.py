"""The report of an audit: a verdict, tidy tables, files and an HTML page."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from gripmoe.attacks.base import Found
from gripmoe.attacks.prompts import ORDER
from gripmoe.auditing.charts import charts_of
from gripmoe.auditing.plan import NOT_CHOSEN
from gripmoe.auditing.verdict import JUDGED_METRICS, Verdict, guessing, interval_over_facts, judge, measured_attacks
from gripmoe.data.prompt_formats import LETTERS
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_json, write_text
from gripmoe.reporting.names import COLLAPSED
from gripmoe.reporting.page import write_page
from gripmoe.reporting.scores import corrected_for_chance

AS_IT_IS = "as it is"
ACCURACY = ("forget_accuracy", "retain_accuracy")
SUMMARY = (
    *ACCURACY,
    *("retain_accuracy_five_shot", "truthfulqa_mc1", "forced_forget_accuracy", "forced_with_recorded_weights"),
    "random_forced_forget_accuracy",
    *("restored_router_all", "searched_routing_after", "silenced_experts", "relearned_from_retain_after"),
    *("relearned_after", "relearned_lora_after", "relearned_routers_after", "relearned_from_corpus_after"),
    *("auc_min_40", "routing_stability", "routing_stability_corrected", "routing_stability_router_only_corrected"),
    *("routing_stability_representation_only_corrected", "changed_experts", "changed_router", "changed_attention"),
)


@dataclass(frozen=True)
class AuditReport:
    """The result of `gripmoe.audit` (ours).

    `found` has the measurements of "original", "unlearned" and perhaps "retrained". `questions` are those that count.
    `absent` says why measurements are missing. `identity` names models, data, settings and code."""

    found: Mapping[str, Found]
    questions: Sequence[dict]
    absent: Mapping[str, str]
    identity: Mapping[str, Any]
    minutes: float

    @cached_property
    def facts(self) -> dict[str, str]:
        return {question["id"]: question["fact"] for question in self.questions}

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict in words, and what each attack returns."""
        attacks = dict.fromkeys(row["attack"] for row in JUDGED_METRICS.values())
        not_made = [name for name in attacks if name in self.absent]
        scores = {name: found.scores for name, found in self.found.items()}
        asked = self.found["unlearned"].scores["forget_accuracy"]
        guess = guessing([question["answer"] for question in self.questions if question["id"] in asked])
        return judge(scores, self.facts, not_made, self.found["unlearned"].metrics, guess)

    @cached_property
    def _measures(self) -> pd.DataFrame:
        rows = []
        for model, found in self.found.items():
            for name, value in (found.metrics | corrected_for_chance(found.metrics)).items():
                row = {"model": model, "measure": name, "value": value, "low": None, "high": None, "n": None}
                if items := found.scores.get(name):
                    _, low, high = interval_over_facts(pd.Series(items, dtype=float), self.facts)
                    row |= {"low": max(low, 0.0), "high": min(high, 1.0), "n": len(items)}  # of an accuracy
                rows.append(row)
        return pd.DataFrame(rows).astype({"value": float, "low": float, "high": float, "n": "Int64"})

    def to_frame(self) -> pd.DataFrame:
        """A row per model and measure: `model`, `measure`, `value`, and for accuracies `low` and `high` of the 95 %
        interval over facts and the number `n` of questions."""
        return self._measures.copy()

    def to_answers(self) -> pd.DataFrame:
        """A row per question, model and condition ("as it is", or an attack): `question`, `choices`, `answer`, `given`,
        `correct`, and the `probability` of the given letter. Probes give no letter."""
        rows = measured_attacks(self.found["unlearned"].scores)
        conditions = {metric: row["label"] for metric, row in rows.items()} | dict.fromkeys(ACCURACY, AS_IT_IS)
        asked = {question["id"]: question for question in self.questions}
        answers = []
        for model, found in self.found.items():
            for metric, scores in found.scores.items():
                if metric not in conditions:
                    continue
                given = found.answers.get(metric, {})
                for question_id, score in scores.items():
                    question = asked[question_id]
                    letter, probability = given.get(question_id, (None, None))
                    if letter is not None and metric == "prompt_choice_shuffle":
                        letter = ORDER[letter]
                    answers.append(
                        {
                            "id": question_id,
                            "kind": "forget" if question["exposure"] == "forget" else "retain",
                            "subject": question["subject"],
                            "question": question["question"],
                            "choices": "; ".join(
                                f"{a}. {b}" for a, b in zip(LETTERS, question["choices"], strict=True)
                            ),
                            "answer": LETTERS[question["answer"]],
                            "model": model,
                            "condition": conditions[metric],
                            "given": "" if letter is None else LETTERS[letter],
                            "correct": bool(score),
                            "probability": probability,
                        }
                    )
        return pd.DataFrame(answers)

    def to_summary(self) -> pd.DataFrame:
        """The most important rows of `to_frame`."""
        frame = self.to_frame()
        steps = {metric.rpartition("_")[0]: metric for metric in measured_attacks(self.found["unlearned"].scores)}
        rank = frame.measure.map({steps.get(name, name): place for place, name in enumerate(SUMMARY)})
        shown = frame.assign(rank=rank).dropna(subset="rank").sort_values("rank", kind="stable")
        return shown[["measure", "model", "value", "low", "high", "n"]].reset_index(drop=True)

    def save(self, folder: Path | str) -> None:
        """Writes audit.json, measures.csv, attacks.csv, questions.csv and index.html, one page for a browser."""
        folder, answers = Path(folder), self.to_answers()
        if _is_of_others(folder / "audit.json", self.identity):
            tqdm.write(f"{folder}: replaces the report on other models or questions", file=sys.stderr)
        frames = {"measures": self.to_frame(), "attacks": self.verdict.returned, "questions": answers}
        for name, frame in frames.items():
            write_text(folder / f"{name}.csv", frame.to_csv(index=False))
        write_json(
            folder / "audit.json",
            {
                "verdict": self.verdict.word,
                "sentence": self.verdict.sentence,
                "metrics": {name: _plain(found.metrics) for name, found in self.found.items()},
                "attacks": [_plain(row) for row in self.verdict.returned.to_dict("records")],
                "not_made": dict(self.absent),
                "minutes": round(self.minutes, 2),
                **self.identity,
            },
        )
        write_page(
            folder / "index.html",
            title="Audit of an unlearned model",
            verdicts=[
                (self.verdict.word, self.verdict.sentence),
                ("retained", self.retained),
                *(("not made", line) for line in self.not_made),
            ],
            summary=_readable(self.to_summary()),
            charts=charts_of(self.to_frame(), self.verdict.returned),
            tables={
                "What attacks return": self.verdict.returned.drop(columns="metric"),
                "Questions": answers.drop(columns="id"),
                "Measures": _readable(frames["measures"]),
            },
        )

    @property
    def retained(self) -> str:
        """Retain accuracy before and after: the verdict is on forgetting alone."""
        before, after = (self.found[name].metrics["retain_accuracy"] for name in ("original", "unlearned"))
        lost = ", little more than a guess: the model may be destroyed, and then it seems to have forgotten too"
        said = f"retain accuracy is {after:.2f} ({before:.2f} in the original model)"
        return said + lost * (after <= COLLAPSED["retain_accuracy"] < before)

    @property
    def not_made(self) -> list[str]:
        """The measurements that were asked for and not made, as "name: reason"."""
        return [f"{name}: {reason}" for name, reason in self.absent.items() if reason != NOT_CHOSEN]

    def __str__(self) -> str:
        return f"{self.verdict.word}: {self.verdict.sentence}\nretained: {self.retained}"

    def _repr_html_(self) -> str:
        summary = self.to_summary().to_html(index=False, float_format="{:.2f}".format, na_rep="", border=0)
        verdict = f"<p><b>{self.verdict.word}</b>: {escape(self.verdict.sentence)}</p>"
        return f"{verdict}<p><b>retained</b>: {escape(self.retained)}</p>{summary}"


def _is_of_others(report: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the file is a report on other models or questions, or no report."""
    if not report.exists():
        return False
    try:
        before = dict(read_json(report))
    except (ConfigError, TypeError, ValueError):
        return True
    return any(before.get(key) != identity.get(key) for key in ("models", "data"))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """None in place of NaN, which JSON does not have."""
    return {key: None if isinstance(value, float) and isnan(value) else value for key, value in values.items()}


def _readable(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(measure=frame.measure.str.replace("_", " "))
