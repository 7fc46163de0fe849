"""Questions and documents of the user's own for an audit, checked and in the form of a data folder's files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gripmoe.attacks.base import sample_of
from gripmoe.data.prompt_formats import LETTERS
from gripmoe.data.published import CHOICES, dev_or_test
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_jsonl, read_text

FEWEST = 20  # questions: with fewer, intervals are too wide
MOST = 0.6  # share of questions of which one letter is the answer
FEWEST_FACTS = 5  # about which the questions of the split test ask; intervals are over facts
BLANK = re.compile(r"\r?\n[ \t]*\r?\n")  # lines, of any system, that separate documents
SUBJECT = "general knowledge"  # the default subject of a question; "" asks without a line about it
JSON_LINES = (".jsonl", ".ndjson", ".json")

QUESTION = ("question", "choices", "answer")  # what each row has

Source = str | Path | Sequence[Any]  # a file, or its rows


def _rows(source: Source, flag: str, *keys: str) -> tuple[str, list[Mapping[str, Any]]]:
    """The name of the source for messages, and its rows."""
    if isinstance(source, str | Path):
        return f"{flag} {source}", read_jsonl(Path(source), *keys)
    if hasattr(source, "iloc") and hasattr(source, "columns"):  # iterating over a table gives the names of its columns
        raise ConfigError(f"{flag}: a table; give its rows, such as `table.to_dict('records')`")
    try:
        rows = list(source)
    except TypeError:
        raise ConfigError(f"{flag}: {source!r} is neither a file nor rows; give one of them") from None
    for number, row in enumerate(rows, 1):
        if missing := [key for key in keys if not isinstance(row, Mapping) or key not in row]:
            raise ConfigError(f"{flag}: row {number} has no `{missing[0]}`; each needs {', '.join(keys)}")
    return flag, rows


def questions_of(source: Source, flag: str, kind: str) -> list[dict]:
    """Questions of a kind, "forget" or "retain". Raises ConfigError, naming the `flag` and the row, if one is wrong, or
    if there are too few for an interval."""
    name, rows = _rows(source, flag, *QUESTION)
    questions, known = [], set()
    facts: dict[tuple[str, ...], str] = {}  # a question that stands twice is about one fact
    rights: dict[tuple[str, ...], str] = {}  # the right choice of a question
    splits: dict[str, str] = {}  # of facts: attacks on `test` questions learn from documents about facts of `dev`
    for number, given in enumerate(rows):
        where = f"{name}: row {number + 1}"
        row = {key: value for key, value in given.items() if not _missing(value) or key in QUESTION}
        right = _right_choice(row, where)
        if rights.setdefault(asked(row), right) != right:
            raise ConfigError(
                f"{where}: question {row['question'][:40]!r} stands twice, and another choice is right there; correct "
                "one of them"
            )
        question_id = str(row.get("id", f"{kind}/{number}"))
        if question_id in known:
            raise ConfigError(f"{where}: the id {question_id!r} stands twice; give each question an id of its own")
        known.add(question_id)
        if (split := row.get("split")) and split not in ("dev", "test"):
            raise ConfigError(
                f"{where}: split {split!r} is neither 'dev' nor 'test'; give one of them, or leave it out"
            )
        exposure = str(row.get("exposure", "unseen_subject"))
        fact = str(row.get("fact", facts.get(asked(row), question_id)))
        if facts.setdefault(asked(row), fact) != fact:
            raise ConfigError(
                f"{where}: question {row['question'][:40]!r} stands twice, about fact {facts[asked(row)]!r} and about "
                f"fact {fact!r}; give both the same `fact`"
            )
        split = split or splits.get(fact) or dev_or_test(str(row.get("fact", row["question"])))
        if splits.setdefault(fact, split) != split:
            raise ConfigError(
                f"{where}: fact {fact!r} has questions in both splits; give all of them one `split`, or no `fact`"
            )
        questions.append(
            {
                "id": question_id,
                "question": row["question"],
                "choices": [str(choice) for choice in row["choices"]],
                "answer": _index(row["answer"]),
                "subject": "" if given.get("subject") == "" else str(row.get("subject", SUBJECT)),
                "fact": fact,
                "wording": str(row.get("wording", "seen")),
                "exposure": "forget" if kind == "forget" else exposure if exposure != "forget" else "unseen_subject",
                "split": split,
            }
        )
    _require_enough(questions, name)
    return questions


def _require_enough(questions: list[dict], name: str) -> None:
    """Raises ConfigError for questions too few, of one split, about too few facts, or most with one right letter."""
    if len(questions) < FEWEST:
        raise ConfigError(f"{name}: {len(questions)} questions; an interval needs {FEWEST} at least: give more")
    if missing := {"dev", "test"} - {row["split"] for row in questions}:
        raise ConfigError(
            f"{name}: no question is of the split {min(missing)!r}, which a hash of the question decides: give a "
            "column `split` with both, or more questions"
        )
    tested = {row["fact"] for row in sample_of([row for row in questions if row["split"] == "test"])}
    if len(tested) < FEWEST_FACTS:
        raise ConfigError(
            f"{name}: the questions of the split 'test' are about {len(tested)} facts (column `fact`); an interval "
            f"needs {FEWEST_FACTS} at least: give more, or leave `fact` out if each question asks about another one"
        )
    (letter, count), *_ = Counter(row["answer"] for row in questions).most_common()
    if count > MOST * len(questions):
        raise ConfigError(
            f"{name}: {LETTERS[letter]} is right in {count} of {len(questions)} questions, so a model that always says "
            f"{LETTERS[letter]} would seem to know them: shuffle the choices of each question"
        )


def _right_choice(row: Mapping[str, Any], where: str) -> str:
    """The right choice. Raises ConfigError for a row that is no question with four choices, one of them right."""
    question, choices, answer = (row[key] for key in QUESTION)
    if not isinstance(question, str) or not question.strip():
        raise ConfigError(f"{where}: question {question!r} is no text; give one, or leave the row out")
    count = len(choices) if isinstance(choices, Sequence) and not isinstance(choices, str) else "no list of"
    if count != CHOICES:
        raise ConfigError(f"{where} has {count} choices; a question has a list of {CHOICES}, for the letters A to D")
    given = [choice for choice in choices if not _missing(choice) and not isinstance(choice, bool)]
    texts = [str(choice).strip() for choice in given if isinstance(choice, str | int | float)]
    if len(list(filter(None, texts))) < CHOICES:
        raise ConfigError(f"{where}: choices {list(choices)!r} are not all texts; give four, or leave the row out")
    index = _index(answer)
    if index is None:
        raise ConfigError(
            f"{where}: answer {answer!r} is neither 0 to {CHOICES - 1} nor A to D; give one of them, counting from 0"
        )
    if texts.count(texts[index]) > 1:
        raise ConfigError(f"{where}: {texts[index]!r} is right and stands twice; change one, or leave the row out")
    return texts[index]


def _missing(value: Any) -> bool:
    """Whether it is None, a blank text as in an empty cell of a CSV file, or NaN, which pandas puts in its place."""
    is_blank = isinstance(value, str) and not value.strip()
    return value is None or is_blank or (isinstance(value, float) and value != value)


def _index(answer: Any) -> int | None:
    """The index of the right choice from 0 to 3, also as 1.0, or A to D; None for anything else."""
    if isinstance(answer, str) and answer.upper() in tuple(LETTERS):
        return LETTERS.index(answer.upper())
    if isinstance(answer, bool) or not isinstance(answer, int | float) or answer not in range(CHOICES):
        return None
    return int(answer)


def asked(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What a question asks, in whatever order its choices stand."""
    return row["question"].strip(), *sorted(str(choice).strip() for choice in row["choices"])


def texts_of(source: Source | None, flag: str, kind: str) -> list[dict]:
    """Documents from JSON lines with `text`, or from plain text with blank lines between documents."""
    if source is None:
        return []
    if isinstance(source, str | Path) and Path(source).suffix not in JSON_LINES:
        text = read_text(Path(source))
        if _is_json(text.lstrip().split("\n")[0]):
            raise ConfigError(f"{flag} {source}: these are JSON lines; name the file {Path(source).stem}.jsonl")
        if Path(source).suffix in (".csv", ".tsv"):
            raise ConfigError(f"{flag} {source}: a table would be read as one text; write JSON lines with `text`")
        name, rows = f"{flag} {source}", [{"text": part} for part in BLANK.split(text)]
    elif isinstance(source, str | Path):
        name, rows = _rows(source, flag, "text")
    else:
        texts = source if isinstance(source, Iterable) else [source]  # which `_rows` refuses
        name, rows = _rows([{"text": row} if isinstance(row, str) else row for row in texts], flag, "text")
    documents = [
        {
            "id": f"{kind}/{number}" if _missing(row.get("id")) else str(row["id"]),
            "prompt": "" if _missing(row.get("prompt")) else row["prompt"],
            "text": row["text"],
        }
        for number, row in enumerate(rows)
        if row["text"] is None or str(row["text"]).strip()
    ]
    if twice := [each for each, count in Counter(row["id"] for row in documents).items() if count > 1]:
        raise ConfigError(
            f"{name}: the id {twice[0]!r} stands twice; give each document an id of its own, as FACT/NUMBER"
        )
    for key, remedy in (("text", "leave the row out"), ("prompt", "leave it out")):
        if wrong := [row["id"] for row in documents if not isinstance(row[key], str)]:
            raise ConfigError(f"{name}: `{key}` of document {wrong[0]!r} is no text; give a string, or {remedy}")
    if not documents:
        raise ConfigError(f"{name}: there is no text in it; give documents, or leave the flag out")
    return documents


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False
