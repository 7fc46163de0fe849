"""The inputs of an audit: a named benchmark, or the user's own questions and texts, as files of a data folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from gripmoe.attacks.relearning import is_about
from gripmoe.auditing.own_data import Source, asked, questions_of, texts_of
from gripmoe.config.benchmarks import Benchmark, PublishedData
from gripmoe.config.reading import parse_as, read_catalogue, require_known
from gripmoe.config.training import Relearning
from gripmoe.config.types import Strict
from gripmoe.data.corpora import rows_of
from gripmoe.data.documents import IGNORED
from gripmoe.data.prompt_formats import SHOTS
from gripmoe.data.published import first_of_each, split_held_out
from gripmoe.evaluation.questions import prompt_of
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_jsonl
from gripmoe.worlds.files import files_of

TABLE = Path(__file__).with_name("audits.yaml")
# Attacks that train on documents about facts of dev questions.
OF_OTHER_FACTS = ("relearning from other facts", "relearning by low-rank updates", "relearning of routers")
FLAGS = {  # by file of documents: the flags that gave them, for messages
    "forget_corpus": "--forget-text",
    "retain_corpus": "--retain-text",
    "held_out_corpus": "--retain-text",
    "membership": "--forget-text, --holdout-text",
}


class AuditSettings(Strict):
    """A row of audits.yaml."""

    benchmark: Benchmark
    relearning: Relearning


OWN = AuditSettings(  # with questions of one's own
    benchmark=Benchmark(
        data=PublishedData(
            source="published",
            forget_questions="",
            retain_questions="",
            forget_corpus="",
            retain_corpus="",
            forget_subject="",  # each question has its own
        ),
        target={"forget_accuracy": 0.27},
        retain_documents=64,
        max_length=512,
        evaluation_batch_size=8,
    ),
    relearning=Relearning(learning_rate=1e-5, batch_size=4, optimizer="adamw_fp32"),  # in bf16 most steps round to none
)


@dataclass(frozen=True)
class Inputs:
    """The files of a data folder by name; and by attack, why it cannot be made with them."""

    benchmark: Benchmark
    relearning: Relearning
    files: dict[str, list[dict]]
    absent: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        for name, rows in self.files.items():
            write_jsonl(folder / f"{name}.jsonl", rows)

    def check_documents(self, tokenizer) -> None:
        """Raises ConfigError for documents of which a model predicts no token."""
        for name, flag in FLAGS.items():
            documents = self.files[name]
            for row, encoded in zip(documents, rows_of(documents, tokenizer), strict=True):
                if set(encoded.labels[1 : self.benchmark.max_length]) <= {IGNORED}:
                    raise ConfigError(
                        f"{flag}: document {row['id']!r} ({row['text'][:40]!r}) has no second token, or a prompt of "
                        f"{self.benchmark.max_length} tokens: a model predicts nothing of it; leave it out"
                    )

    def check_questions(self, tokenizer, positions: int) -> None:
        """Raises ConfigError for a question longer than the `positions` that a model reads: lm-evaluation-harness would
        cut it, and attacks would not."""
        for kind in ("forget", "retain"):
            for row in self.files[f"{kind}_questions"]:
                prompt = prompt_of(row)  # a token has a byte or more
                if len(prompt.encode()) >= positions and (length := len(tokenizer(prompt)["input_ids"])) > positions:
                    raise ConfigError(
                        f"{kind} question {row['id']!r} ({row['question'][:40]!r}) has {length} tokens with its "
                        f"choices, and the models read {positions}; leave it out"
                    )

    def questions(self, kind: str, split: str) -> list[dict]:
        return [row for row in self.files[f"{kind}_questions"] if row["split"] == split]


def settings_named(name: str) -> AuditSettings:
    """A row of audits.yaml. Raises ConfigError for an unknown name."""
    rows = read_catalogue(TABLE, AuditSettings)
    require_known(name, rows, "--forget")
    return rows[name]


def settings_of(given: Relearning | Mapping[str, Any] | None, row: AuditSettings) -> Relearning:
    """The row's settings of relearning, with the given keys in place of its own."""
    if isinstance(given, Relearning):
        given = {key: getattr(given, key) for key in given.model_fields_set}
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"--relearning: {given!r} is no mapping; give keys of {', '.join(Relearning.model_fields)}")
    return parse_as(Relearning, row.relearning.model_dump() | dict(given or {}), Path("--relearning"))


def benchmark_inputs(name: str, relearning: Relearning | Mapping[str, Any] | None = None) -> Inputs:
    """The questions and corpora of a row of audits.yaml; `relearning` is as in `settings_of`."""
    row = settings_named(name)
    try:
        files = files_of(row.benchmark.data)
    except ConfigError as error:
        raise ConfigError(f"--forget {name}: {error} Or give --questions and texts of your own.") from error
    relearning = settings_of(relearning, row)
    corpora = files["forget_corpus"], files["retain_corpus"]
    absent = _too_few(files["forget_questions"], *corpora, relearning, "the benchmark has", "the benchmark has")
    if not files["membership"]:
        absent["membership"] = "the benchmark has no texts that surely no model has seen"
    return Inputs(row.benchmark, relearning, files, absent)


def own_inputs(
    forget: Source,
    retain: Source,
    forget_text: Source | None = None,
    retain_text: Source | None = None,
    holdout_text: Source | None = None,
    relearning: Relearning | Mapping[str, Any] | None = None,
) -> Inputs:
    """Forget and retain questions (`question`, four `choices`, `answer`), forget and retain documents, and holdout
    documents that no model has seen. Each argument is a file or its rows; `relearning` is as in `settings_of`. Raises
    ConfigError, naming file and row, for missing or wrong input."""
    relearning = settings_of(relearning, OWN)
    if isinstance(forget, str | Path) and isinstance(retain, str | Path) and Path(forget) == Path(retain):
        raise ConfigError(f"--questions, --retain-questions: both are {forget}; give questions of two kinds")
    forget_rows = questions_of(forget, "--questions", "forget")
    retain_rows = questions_of(retain, "--retain-questions", "retain")
    forgotten = {asked(row) for row in forget_rows}
    if both := [row for row in retain_rows if asked(row) in forgotten]:
        raise ConfigError(
            f"--questions, --retain-questions: questions are in both, first {both[0]['question']!r} ({len(both)} in "
            "all); leave each in one"
        )
    if {row["id"] for row in forget_rows} & {row["id"] for row in retain_rows}:  # answers are kept by id
        for kind, rows in (("forget", forget_rows), ("retain", retain_rows)):
            for row in rows:
                row["id"] = f"{kind}/{row['id']}"
    forget_texts = texts_of(forget_text, "--forget-text", "forget")
    retain_texts = texts_of(retain_text, "--retain-text", "retain")
    holdout = texts_of(holdout_text, "--holdout-text", "holdout")
    given = {"--forget-text": forget_texts, "--retain-text": retain_texts, "--holdout-text": holdout}
    for one, other in combinations(given, 2):
        first, second = ({f"{row['prompt']}{row['text']}".strip() for row in given[name]} for name in (one, other))
        both = first & second  # a few may be headings
        if both and 2 * len(both) >= min(len(first), len(second)):
            told = f"both have {min(both)[:40]!r} ({len(both)} documents in all)"
            raise ConfigError(f"{one}, {other}: {told}; leave each in one")
    kept, held_out = split_held_out(first_of_each(retain_texts))
    parts = {"forget": forget_texts, "holdout": holdout} if forget_texts and holdout else {}
    membership = [{"id": row["id"], "part": part, "text": row["text"]} for part in parts for row in parts[part]]
    files = {
        "forget_questions": forget_rows,
        "retain_questions": retain_rows,
        "truthfulqa": [],
        "forget_corpus": forget_texts or _prompts(forget_rows),
        "retain_corpus": kept,
        "held_out_corpus": held_out or _prompts(retain_rows),
        "membership": membership,
    }
    absent = _impossible(forget_rows, forget_texts, kept, membership, relearning)
    sources = {"forget_questions": forget, "retain_questions": retain}
    sources = {name: str(given) if isinstance(given, str | Path) else "rows" for name, given in sources.items()}
    data = OWN.benchmark.data.model_copy(update=sources)
    return Inputs(OWN.benchmark.model_copy(update={"data": data}), relearning, files, absent)


def _impossible(
    questions: Sequence[dict],
    forget_texts: Sequence[dict],
    retain_texts: Sequence[dict],
    membership: Sequence[dict],
    relearning: Relearning,
) -> dict[str, str]:
    """Why attacks cannot be made with these forget questions and documents, by attack."""
    dev = [row for row in questions if row["split"] == "dev"]
    given = ("--forget-text gives", "--retain-text, without the tenth that is held out, gives")
    absent = _too_few(questions, forget_texts, retain_texts, relearning, *given)
    if not membership:
        absent["membership"] = "--forget-text and --holdout-text are needed"
    of_subject = Counter(row["subject"] for row in dev)
    of_fact = Counter((row["subject"], row["fact"]) for row in dev)
    tested = [row for row in questions if row["split"] == "test"]
    least = min(of_subject[row["subject"]] - of_fact[row["subject"], row["fact"]] for row in tested)
    if least < SHOTS:
        absent["prompts"] = (
            f"five questions of the same subject and of other facts are solved before each; the split dev has {least}"
        )
    if len({row["answer"] for row in dev}) < 2:
        absent["probes"] = absent["probes of single experts"] = "the questions of the split dev have one letter alone"
    return absent


def _too_few(
    questions: Sequence[dict],
    forget_texts: Sequence[dict],
    retain_texts: Sequence[dict],
    relearning: Relearning,
    forget_given: str,
    retain_given: str,
) -> dict[str, str]:
    """Why the relearning attacks that lack documents cannot be made, by attack."""
    dev, test = ({row["fact"] for row in questions if row["split"] == split} for split in ("dev", "test"))
    about_dev = [row for row in forget_texts if is_about(row["id"], dev, test)]
    known = "the facts of documents are known, so that other facts are relearned"
    absent = {"relearning from the corpus": known} if about_dev else {}
    for names, rows, given, which in (
        (["relearning from the corpus"], forget_texts, forget_given, "to train on"),
        (OF_OTHER_FACTS, about_dev, forget_given, "whose `id` begins with a dev question's `fact`"),
        (["relearning from retain documents"], retain_texts, retain_given, "to train on"),
    ):
        if len(rows) < relearning.batch_size:
            reason = f"{given} {len(rows)} documents {which}, a batch has {relearning.batch_size}"
            absent |= dict.fromkeys(names, reason)
    return absent


def _prompts(questions: Iterable[dict]) -> list[dict]:
    """The questions of the dev split, in place of documents, to measure routing only."""
    return [{"id": row["id"], "prompt": "", "text": prompt_of(row)} for row in questions if row["split"] == "dev"]
