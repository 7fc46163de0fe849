"""Letter questions (WMDP, MMLU): through lm-evaluation-harness for forget and retain accuracy, directly for attacks and
the stop rule, in about half the time.

Both give the same accuracy (a test holds them equal): the answer is the letter with the highest log-likelihood after
"Answer:", 0-shot, below the harness's description line.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gripmoe.data.documents import Batch, collate, encode_all, length_buckets
from gripmoe.data.prompt_formats import LETTER_TASK, LETTERS, letter_description, letter_question, template_of
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_jsonl
from gripmoe.moe.families import logits_of
from gripmoe.moe.modes import evaluating

QUESTION_KEYS = ("id", "question", "choices", "answer", "subject", "fact", "wording", "exposure", "split")
HARNESS_KEYS = ("id", "question", "choices", "answer")  # that its tasks read
ANSWER = "Answer:"  # how the prompt of a letter question ends


@dataclass(frozen=True)
class Answer:
    """One question's outcome: the letter chosen, whether it is right, and the log-likelihood of each letter."""

    id: str
    chosen: int
    correct: bool
    letter_logprobs: tuple[float, ...]


def load_questions(path: Path, split: str | None = None) -> list[dict]:
    """The questions of a file, or those of one split. Raises ConfigError if there are none, or if one lacks a key."""
    rows = [row for row in read_jsonl(path, *QUESTION_KEYS) if split is None or row["split"] == split]
    if not rows:
        of_split = f" in split {split!r}" if split else ""
        raise ConfigError(f"{path}: no questions{of_split}; add some, or run the step again that writes it")
    return rows


def write_parquet(path: Path, rows: Sequence[dict], keys: Sequence[str]) -> None:
    """Writes `keys` of the rows for the harness, which would read dates in a JSON file as points in time."""
    from datasets import Dataset

    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list([{key: row[key] for key in keys} for row in rows]).to_parquet(str(path))


def harness_task(name: str, questions_file: Path, subject: str, shots: int = 0) -> dict:
    """A multiple-choice task of the harness over a file of `write_parquet`, in the WMDP and MMLU template; `shots`
    solved questions before each come from the file beside it whose name ends in `.shots`."""
    described = json.dumps(letter_description(subject), ensure_ascii=False)  # jinja would decode surrogates one by one
    files = {"test": str(questions_file)} | ({"shots": f"{questions_file}.shots"} if shots else {})
    task = {
        "task": name,
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(questions_file.with_name("cache"))},
        "test_split": "test",
        "num_fewshot": shots,
        "output_type": "multiple_choice",
        "description": f"{{{{ {described} }}}}",  # a template that the harness renders
        "doc_to_text": template_of(LETTER_TASK),
        "doc_to_choice": list(LETTERS),
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    return task | ({"fewshot_split": "shots", "fewshot_config": {"sampler": "first_n"}} if shots else {})


def harness_samples(
    model,
    tokenizer,
    tasks: Sequence[dict | str],
    batch_size: int,
    task_folder: Path | None = None,
) -> dict[str, list[dict]]:
    """The samples that lm-evaluation-harness logs, by task, for the model in memory. A task is its whole configuration,
    or the name of one that a file of `task_folder` configures."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_folder) if task_folder else [], include_defaults=False)
    loaded = manager.load(list(tasks))
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")
    with evaluating(model), _templates_compiled_once():
        results = evaluate(lm=lm, task_dict=loaded, bootstrap_iters=0, log_samples=True)
    return results["samples"]


@contextmanager
def _templates_compiled_once() -> Iterator[None]:
    """Within the block the harness compiles each template once. Otherwise the harness compiles a task's templates for
    every document, which takes a quarter of the time of a small model."""
    from lm_eval.utils import env

    env.from_string = functools.cache(env.from_string)
    try:
        yield
    finally:
        del env.from_string


def harness_answers(
    model,
    tokenizer,
    questions: Sequence[dict],
    *,
    work_folder: Path,
    batch_size: int,
    solved: Sequence[dict] = (),
    shots: int = 0,
) -> list[Answer]:
    """Answers to `questions`, in their order, by lm-evaluation-harness on the model in memory. Questions of a subject
    form one task, as in MMLU, with `shots` of that subject's `solved` before each. `work_folder` holds the task data.
    """
    by_subject: dict[str, list[dict]] = {}
    for question in questions:
        by_subject.setdefault(question["subject"], []).append(question)
    tasks = []
    for number, (subject, rows) in enumerate(by_subject.items()):  # by number: a subject may have any characters
        file = work_folder / f"{number}.parquet"
        write_parquet(file, rows, HARNESS_KEYS)
        if shots:
            solved_here = [row for row in solved if row["subject"] == subject][:shots]
            write_parquet(Path(f"{file}.shots"), solved_here, HARNESS_KEYS)
        tasks.append(harness_task(f"letters_{number}", file, subject, shots))
    answers = {}
    for samples in harness_samples(model, tokenizer, tasks, batch_size).values():
        for sample in samples:
            logprobs = tuple(float(response[0]) for response in sample["filtered_resps"])
            name = sample["doc"]["id"]
            answers[name] = Answer(name, logprobs.index(max(logprobs)), bool(sample["acc"]), logprobs)
    return [answers[question["id"]] for question in questions]


@torch.no_grad()
def direct_answers(
    model,
    tokenizer,
    questions: Sequence[dict],
    prompt: Callable[[dict], str] | None = None,
) -> list[Answer]:
    """The answers of `harness_answers`, computed without the harness, which takes about twice the time. `prompt`
    writes a question in another way than the harness does. A model that computes NaN answers A."""
    by_id = {question["id"]: question for question in questions}
    letters = [letter_token(tokenizer, letter) for letter in LETTERS]
    answers = {}
    with evaluating(model):
        for batch in question_batches(tokenizer, questions, model.device, prompt or prompt_of):
            hidden = model.model(**batch.inputs).last_hidden_state
            last = batch.attention_mask.sum(dim=1) - 1
            at_last = hidden[torch.arange(len(last), device=last.device), last]
            logprobs = logits_of(model, at_last).log_softmax(dim=-1)[:, letters]
            for row_id, scores in zip(batch.row_ids, logprobs.tolist(), strict=True):
                chosen = scores.index(max(scores))
                answers[row_id] = Answer(row_id, chosen, chosen == by_id[row_id]["answer"], tuple(scores))
    return [answers[question["id"]] for question in questions]


@functools.lru_cache
def letter_token(tokenizer, letter: str) -> int:
    """The token of a letter after "Answer:". Raises ConfigError if a letter takes several tokens there, whose
    likelihoods the harness would add."""
    before, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (ANSWER, f"{ANSWER} {letter}"))
    if whole[:-1] != before:
        raise ConfigError(
            f"tokenizer: {letter!r} after {ANSWER!r} is not one token, so letter questions cannot be answered by one "
            "prediction; take a model whose tokenizer has a token for it"
        )
    return whole[-1]


def prompt_of(question: dict, solved: Sequence[dict] = ()) -> str:
    """The description of the question's subject, `solved` questions with their letters, and the question."""
    shots = (f"{letter_question(row['question'], row['choices'])} {LETTERS[row['answer']]}\n\n" for row in solved)
    asked = letter_question(question["question"], question["choices"])
    return letter_description(question["subject"]) + "".join(shots) + asked


def question_batches(tokenizer, questions: Sequence[dict], device, prompt=prompt_of) -> Iterator[Batch]:
    """The prompts of `questions` by length, in passes of bounded memory."""
    for batch in _batches(tokenizer, tuple((question["id"], prompt(question)) for question in questions)):
        yield batch.to(device)


@functools.lru_cache(maxsize=16)
def _batches(tokenizer, prompts: tuple[tuple[str, str], ...]) -> list[Batch]:
    """Kept, since checks and attacks ask the same questions again."""
    rows = encode_all(tokenizer, ((name, [(prompt, False)]) for name, prompt in prompts))
    return [collate(bucket, tokenizer.pad_token_id) for bucket in length_buckets(rows)]


def accuracy(answers: Sequence[Answer]) -> float:
    return sum(answer.correct for answer in answers) / len(answers)
