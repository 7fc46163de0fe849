"""The metrics of a model on a benchmark of letter questions (multiple choice, answered by a letter), and its general
utility (App. A.3: few-shot RA of Table 1, and TruthfulQA), all through lm-evaluation-harness."""

from __future__ import annotations

import math
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from gripmoe.config.benchmarks import Benchmark
from gripmoe.data.prompt_formats import SHOTS
from gripmoe.evaluation.metrics import choice_metrics, question_results
from gripmoe.evaluation.questions import accuracy, harness_answers, harness_samples, load_questions, write_parquet
from gripmoe.io.files import read_jsonl, write_yaml


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


def truthfulqa(model, tokenizer, rows: Sequence[dict], *, work_folder: Path, batch_size: int) -> dict[str, float]:
    """`truthfulqa_mc1` (share of questions whose likeliest answer is true) and `truthfulqa_mc2` (probability of true
    answers), by the harness's tasks on `rows`, which have the data set's schema."""
    file = work_folder / "truthfulqa.parquet"
    write_parquet(file, rows, ("question", "mc1_targets", "mc2_targets"))
    reading = {"data_files": {"validation": str(file)}, "cache_dir": str(file.with_name("cache"))}
    local = {"dataset_path": "parquet", "dataset_name": None, "dataset_kwargs": reading}
    names = ("truthfulqa_mc1", "truthfulqa_mc2")
    for name in names:
        own = resources.files("lm_eval") / "tasks" / "truthfulqa" / f"{name}.yaml"
        write_yaml(work_folder / f"{name}.yaml", {"include": str(own), "task": f"local_{name}", **local})
    samples = harness_samples(model, tokenizer, [f"local_{name}" for name in names], batch_size, work_folder)
    first = [float(sample["acc"]) for sample in samples["local_truthfulqa_mc1"]]
    second = [_share_of_true(sample) for sample in samples["local_truthfulqa_mc2"]]
    return {name: sum(values) / len(values) for name, values in zip(names, (first, second), strict=True)}


def _share_of_true(sample: dict) -> float:
    """MC2 of a question. The harness's own is NaN where the probabilities of all its answers underflow."""
    labels = sample["doc"]["mc2_targets"]["labels"]
    logprobs = [float(response[0]) for response in sample["filtered_resps"]]
    odds = [math.exp(logprob - max(logprobs)) for logprob in logprobs]
    return sum(odd for odd, label in zip(odds, labels, strict=True) if label) / sum(odds)


def solved_questions(file: Path) -> list[dict]:
    """Solved questions for few-shot prompts: MMLU's own examples, or the dev split of the embedded world."""
    rows = read_jsonl(file, "split")
    return [row for row in rows if row["split"] == "shots"] or [row for row in rows if row["split"] == "dev"]


def general_utility(
    model,
    tokenizer,
    retain: Sequence[dict],
    solved: Sequence[dict],
    truths: Sequence[dict],
    *,
    work_folder: Path,
    batch_size: int,
    few_shot_questions: int,
) -> dict[str, float]:
    """TruthfulQA on `truths`, and five-shot accuracy on a fixed sample of `retain` questions, with `solved` questions
    of their subject as shots. Leaves out TruthfulQA without `truths`, and subjects with fewer than five solved
    questions."""
    counts = Counter(question["subject"] for question in solved)
    asked = [question for question in retain if counts[question["subject"]] >= SHOTS]
    harness, metrics = dict(work_folder=work_folder, batch_size=batch_size), {}
    if asked:
        sample = random.Random(0).sample(asked, min(few_shot_questions, len(asked)))
        answers = harness_answers(model, tokenizer, sample, solved=solved, shots=SHOTS, **harness)
        metrics["retain_accuracy_five_shot"] = accuracy(answers)
    return metrics | (truthfulqa(model, tokenizer, truths, **harness) if truths else {})
