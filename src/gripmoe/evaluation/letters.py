"""The metrics of a model on a benchmark of letter questions (multiple choice, answered by a letter)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gripmoe.config.benchmarks import Benchmark
from gripmoe.evaluation.general import general_utility, solved_questions
from gripmoe.evaluation.metrics import choice_metrics, question_results
from gripmoe.evaluation.questions import harness_answers, load_questions
from gripmoe.io.files import read_jsonl


def letter_metrics(benchmark: Benchmark, model, tokenizer, data: Path) -> tuple[dict[str, float], list[dict]]:
    """Forget and retain accuracy on test questions and general utility; and a row for each question."""
    forget, retain = (load_questions(data / f"{name}_questions.jsonl", "test") for name in ("forget", "retain"))
    questions = [*forget, *retain]
    with tempfile.TemporaryDirectory() as work:
        harness = dict(work_folder=Path(work), batch_size=benchmark.evaluation_batch_size)
        answers = harness_answers(model, tokenizer, questions, **harness)
        utility = general_utility(
            model,
            tokenizer,
            retain,
            solved_questions(data / "retain_questions.jsonl"),
            read_jsonl(data / "truthfulqa.jsonl"),
            few_shot_questions=benchmark.few_shot_questions,
            **harness,
        )
    return choice_metrics(questions, answers) | utility, question_results(questions, answers)
