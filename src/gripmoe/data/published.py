"""Converts published benchmarks, from the hub or a local clone, to the files of an embedded benchmark."""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from gripmoe.config.benchmarks import PublishedData
from gripmoe.data.prompt_formats import SHOTS
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_jsonl

HELD_OUT_EVERY = 10  # every tenth retain document is held out from unlearning, to measure routing stability
# For each split of MMLU: its use here, and the key of `data.rows` with its number of rows. "test" is reported, the stop
# rule sees "dev", and "shots" are the solved questions of few-shot prompts.
RETAIN_SPLITS = {
    "dev": ("shots", "mmlu_dev"),
    "validation": ("dev", "mmlu_validation"),
    "test": ("test", "retain_questions"),
}
MIN_CHARACTERS = 50  # shorter lines (headings, blanks) are not documents
CHOICES = 4  # A to D, as prompts list them
TARGETS = ("mc1_targets", "mc2_targets")  # of TruthfulQA


def benchmark_files(data: PublishedData) -> dict[str, list[dict]]:
    """WMDP-Cyber with MMLU, TruthfulQA and the corpora to forget and to retain. Raises ConfigError, with the download
    command, for a data set that cannot be read, lacks a column or has too few questions or documents, for a text that
    is none, for a question without four choices or with an answer out of range, and for a question of TruthfulQA whose
    choices and labels do not fit.

    What could not be measured is left out with a message: empty questions, and those whose right choice stands twice;
    retain questions that stand in an earlier split too; retain documents that repeat another one, which might be held
    out; and what is both to be retained and to be forgotten. Retain documents are in a random order, because Methods A
    and B take the first ones, and WikiText keeps the lines of an article together."""

    def rows(key: str, name: str, split: str, *columns: str, counted: str | None = None) -> Iterable[dict]:
        """`counted` is the key of `data.rows` that has the number of rows, if it is not `key`."""
        path = getattr(data, key)
        revision, expected = data.revisions.get(path), data.rows.get(counted or key)
        return load_rows(path, name, split, columns, revision=revision, key=f"data.{key}", expected=expected)

    asked = ("question", "choices", "answer")
    forget = _questions(rows("forget_questions", "wmdp-cyber", "test", *asked), "forget", data.forget_subject)
    dev = sum(question["split"] == "dev" for question in forget)
    if dev < SHOTS or dev == len(forget):  # prompt attacks put dev questions, solved, before each other question
        raise ConfigError(
            f"benchmarks.yaml: data.forget_questions: {data.forget_questions} has {len(forget)} questions. A hash of "
            f"the text puts {dev} of them into the dev split, which needs at least {SHOTS}, and leaves "
            f"{len(forget) - dev} to report; add questions"
        )
    if len({question["answer"] for question in forget if question["split"] == "dev"}) < 2:
        raise ConfigError(
            f"benchmarks.yaml: data.forget_questions: {data.forget_questions} has one letter as the answer of all "
            f"{dev} questions of the dev split, from which probes learn; shuffle the choices"
        )
    retain = []
    for split, (here, counted) in RETAIN_SPLITS.items():
        found = _questions(
            rows("retain_questions", "all", split, *asked, "subject", counted=counted), "retain", None, here
        )
        where = f"retain_questions ({here})"
        found = _without(found, forget, _asked, where, "are to be forgotten")
        retain += _without(found, retain, _asked, where, "stand in an earlier split")
    if missing := {"dev", "test"} - {question["split"] for question in retain}:
        raise ConfigError(
            f"benchmarks.yaml: data.retain_questions: {data.retain_questions} has no question of the {min(missing)} "
            "split that stands nowhere else; add questions"
        )
    truths = rows("truthfulqa", "multiple_choice", "validation", "question", *TARGETS)
    retain_rows = _documents(rows("retain_corpus", "wikitext-2-raw-v1", "test", "text"), "retain")
    retain_texts = first_of_each(retain_rows)
    if repeated := len(retain_rows) - len(retain_texts):
        where = f"benchmarks.yaml: data.retain_corpus: {repeated} of {len(retain_rows)} documents"
        print(f"{where} are left out: they repeat another one", file=sys.stderr)
    forget_texts = _documents(rows("forget_corpus", "cyber-forget-corpus", "train", "text"), "forget")
    retain_texts = _without(retain_texts, forget_texts, itemgetter("text"), "retain_corpus", "are to be forgotten")
    random.Random(0).shuffle(retain_texts)
    kept, held_out = split_held_out(retain_texts)
    if not kept:
        raise ConfigError(f"benchmarks.yaml: data.retain_corpus: {data.retain_corpus} has one document; add others")
    return {
        "forget_questions": forget,
        "retain_questions": retain,
        "truthfulqa": _truths(truths),
        "forget_corpus": forget_texts,
        "retain_corpus": kept,
        "held_out_corpus": held_out,
        "membership": [],  # no published statements are sure to be unseen by models
    }


def _without(rows: list[dict], others: list[dict], key: Callable[[dict], Any], data: str, why: str) -> list[dict]:
    known = set(map(key, others))
    kept = [row for row in rows if key(row) not in known]
    if left_out := len(rows) - len(kept):
        print(f"benchmarks.yaml: data.{data}: {left_out} of {len(rows)} are left out: they {why}", file=sys.stderr)
    return kept


def _asked(question: dict) -> tuple:
    return question["question"].strip(), *sorted(question["choices"])


def first_of_each(documents: list[dict]) -> list[dict]:
    """The documents without those whose prompt and text stand before: they might be both retained and held out."""
    firsts: dict[tuple[str | None, str], dict] = {}
    for document in documents:
        firsts.setdefault((document.get("prompt"), document["text"]), document)
    return list(firsts.values())


def split_held_out(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """The documents that unlearning may use, and those that are held out from it."""
    return [row for i, row in enumerate(rows) if i % HELD_OUT_EVERY], rows[::HELD_OUT_EVERY]


def load_rows(
    path: str,
    name: str,
    split: str,
    columns: tuple[str, ...],
    *,
    revision: str | None,
    key: str,
    expected: int | None = None,
) -> Iterable[dict]:
    """Rows of one split of a data set, by hub id or from a local clone. Raises ConfigError, naming the configuration
    key and the remedy, if it cannot be read, lacks a column, or has another number of rows than `expected`."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    source = _in_cache(path, revision)
    try:
        with tempfile.TemporaryDirectory() as folder:  # the usual cache distinguishes local clones only by name
            own = {"cache_dir": folder, "keep_in_memory": True} if Path(source).is_dir() else {}
            table = load_dataset(source, name, split=split, revision=revision, **own)
    except (OSError, ValueError, DatasetsError, StopIteration) as error:  # the last for a file without a row
        why = error.__cause__ or error if isinstance(error, DatasetsError) else error
        remedy = (
            f"Without internet, run `hf download --repo-type dataset {path}` elsewhere and copy the hub's cache, or "
            f"set {key} to a clone of the repository (with `git lfs`)."
        )
        if Path(source).is_dir() and _is_described(source, name, split, revision):
            remedy = (
                f"A file there is damaged or a Git LFS pointer: correct it, or download {source} again (a clone needs "
                "`git lfs`)."
            )
        elif Path(path).is_dir():
            remedy = (
                f"Its README.md has to name the files of {name!r}, as docs/own_data.md shows; a clone needs `git lfs`."
            )
        elif Path(path).is_absolute():
            remedy = "There is no such folder: correct the path."
        said = str(why).removesuffix(".") or "a file is empty"
        raise ConfigError(
            f"benchmarks.yaml: {key}: cannot read {path!r} ({name}, {split}): {said}. {remedy}"
        ) from error
    if missing := [column for column in columns if column not in table.column_names]:
        raise ConfigError(
            f"benchmarks.yaml: {key}: {path} ({name}, {split}) lacks {', '.join(missing)}; it has "
            f"{', '.join(table.column_names)}; rename or add columns"
        )
    if expected is not None and len(table) != expected:
        raise ConfigError(
            f"{path} ({name}, {split}) has {len(table)} rows, benchmarks.yaml: data.rows says {expected}: an "
            "incomplete download or another revision. Download it again, or correct data.rows."
        )
    kinds = " ".join(str(table.features[column]) for column in columns)
    if table.info.builder_name == "json" and any(kind in kinds for kind in ("timestamp", "float", "double")):
        return _json_lines(source, name, split, revision)
    return table


def _is_described(path: str, name: str, split: str, revision: str | None) -> bool:
    """Whether a folder's README.md names files that are there."""
    from datasets import load_dataset_builder

    try:
        return bool(load_dataset_builder(path, name, revision=revision).config.data_files[split])
    except Exception:  # whatever it was, `load_dataset` has said it
        return False


def _in_cache(path: str, revision: str | None) -> str:
    """The folder of a hub id in the hub's cache, if the hub is not to be asked: `load_dataset` does not look there."""
    from huggingface_hub import is_offline_mode, snapshot_download

    if Path(path).is_dir() or not is_offline_mode():
        return path
    try:
        return snapshot_download(path, repo_type="dataset", revision=revision, local_files_only=True)
    except (OSError, ValueError):  # not there, or no id; datasets has a cache of its own
        return path


def _json_lines(path: str, name: str, split: str, revision: str | None) -> list[dict]:
    """The same rows as JSON alone has them: datasets makes points in time of dates, and decimals of all numbers of a
    column if one is a decimal."""
    from datasets import DownloadManager, load_dataset_builder

    files = load_dataset_builder(path, name, revision=revision).config.data_files[split]
    return [row for file in DownloadManager().download(list(files)) for row in read_jsonl(Path(file))]


def text_of(value: Any, where: str) -> str:
    """The value. Raises ConfigError, naming `where` it stands, if it is no text."""
    if not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r} and no text: give it one, or remove the row")
    return value


def _questions(rows: Iterable[dict], domain: str, subject: str | None, split: str | None = None) -> list[dict]:
    """Questions in the project's form. Without `split`, a hash makes each question "dev" or "test"."""
    questions, left_out = [], []
    for number, row in enumerate(rows):
        name = f"{domain}/{number}" if split in (None, "test") else f"{domain}/{split}/{number}"
        where = f"benchmarks.yaml: data.{domain}_questions: question {name}"
        text, choices, answer = text_of(row["question"], f"{where}: `question`"), row["choices"], row["answer"]
        if not isinstance(choices, list) or not all(isinstance(choice, str | int | float) for choice in choices):
            raise ConfigError(f"{where} ({text[:40]!r}): `choices` is {choices!r}; give a list of {CHOICES} texts")
        if len(choices) != CHOICES or answer not in range(CHOICES):
            raise ConfigError(
                f"{where} ({text[:40]!r}): {len(choices)} choices and answer {answer!r}; a question "
                f"has {CHOICES} choices, and its answer is the number of one of them, 0 to {CHOICES - 1}"
            )
        texts = [str(choice) for choice in choices]
        if not text.strip() or [choice.strip() for choice in texts].count(texts[int(answer)].strip()) > 1:
            left_out.append(name)
            continue
        questions.append(
            {
                "id": name,
                "question": text,
                "choices": texts,
                "answer": int(answer),
                "subject": subject or text_of(row["subject"], f"{where}: `subject`").replace("_", " "),
                "fact": name,
                "wording": "seen",
                "exposure": "forget" if domain == "forget" else "unseen_subject",
                "split": split or dev_or_test(text),
            }
        )
    if left_out:
        named = ", ".join(left_out[:3]) + ", ..." * bool(left_out[3:])
        print(
            f"benchmarks.yaml: data.{domain}_questions: {len(left_out)} of {len(left_out) + len(questions)} questions "
            f"({named}) are left out: they are empty, or their right choice stands twice",
            file=sys.stderr,
        )
    return questions


def _truths(rows: Iterable[dict]) -> list[dict]:
    truths = [{key: row[key] for key in ("question", *TARGETS)} for row in rows]
    for number, row in enumerate(truths):
        where = f"benchmarks.yaml: data.truthfulqa: row {number}"
        text_of(row["question"], f"{where}: `question`")
        for key in TARGETS:
            choices, labels = ((row[key] or {}).get(name) or [] for name in ("choices", "labels"))
            fits = len(choices) == len(labels) and {*labels} == {0, 1} and all(isinstance(c, str) for c in choices)
            if not fits or (key == "mc1_targets" and (labels[0] != 1 or sum(labels) != 1)):
                raise ConfigError(
                    f"{where}: `{key}` is {row[key]!r}; it needs texts as `choices`, and a label, 0 or 1, for each. In "
                    "`mc1_targets` the first choice alone is true"
                )
    return truths


def dev_or_test(text: str) -> str:
    """Splits by a hash: "dev" (for the stop rule) for a third of all texts, "test" (reported) for the others."""
    return "dev" if hashlib.sha256(text.encode()).digest()[0] % 3 == 0 else "test"


def halves(texts: Sequence[str]) -> list[str]:
    """The split of each text: "dev" for the half with the lowest hashes, "test" for the others."""
    ordered = sorted(range(len(texts)), key=lambda number: hashlib.sha256(texts[number].encode()).digest())
    dev = set(ordered[: len(texts) // 2])
    return ["dev" if number in dev else "test" for number in range(len(texts))]


def _documents(rows: Iterable[dict], domain: str) -> list[dict]:
    where = f"benchmarks.yaml: data.{domain}_corpus"
    texts = [text_of(row["text"], f"{where}: `text` of row {number}").strip() for number, row in enumerate(rows)]
    documents = [
        {"id": f"{domain}/{number}", "prompt": "", "text": text}
        for number, text in enumerate(texts)
        if len(text) >= MIN_CHARACTERS
    ]
    if not documents:
        raise ConfigError(
            f"{where}: none of its {len(texts)} texts has {MIN_CHARACTERS} characters: a row is a document"
        )
    if short := len(texts) - len(documents):
        print(
            f"{where}: {short} of {len(texts)} texts are left out: below {MIN_CHARACTERS} characters", file=sys.stderr
        )
    return documents
