"""MUSE-News, from the hub or a local folder of the same layout (App. A.1; Shi et al. 2024)."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping

from gripmoe.data.published import dev_or_test, halves, load_rows, text_of
from gripmoe.io.errors import ConfigError

CONTEXT = "context"  # the `split` of the in-context pairs


def news_files(
    repository: str, revision: str | None = None, expected: Mapping[str, int] | None = None
) -> dict[str, list[dict]]:
    """The files of a news benchmark. Raises ConfigError, with the download command, if the data set cannot be read,
    lacks a column, has another number of rows than `expected` ("config/split": number), has a value that is no text or
    an empty one, or has so few questions that a split is empty. Questions that stand solved in the prompt of the others
    are left out with a message.

    Corpora: raw/forget to forget and raw/retain1 to retain, in a random order because methods record the first ones,
    and raw/retain2 to measure routing on tokens that unlearning did not see. Questions and prompts have a `split`:
    "dev" for the stop rule, "test" for the tables. Half of the prompts are dev: there are few.
    """

    def rows(config: str, split: str, *columns: str) -> list[dict]:
        count = (expected or {}).get(f"{config}/{split}")
        key = "data.repository"
        table = load_rows(repository, config, split, columns, revision=revision, key=key, expected=count)
        where = f"{repository} ({config}, {split})"
        found = [
            {name: text_of(row[name], f"{where}: `{name}` of row {number}") for name in columns}
            for number, row in enumerate(table)
        ]
        for number, row in enumerate(found):
            if blank := [name for name in columns if not row[name].strip()]:
                raise ConfigError(f"{where}: `{blank[0]}` of row {number} is empty: give it a text, or remove the row")
        return found

    def documents(split: str) -> list[dict]:
        texts = rows("raw", split, "text")
        return [{"id": f"{split}/{i}", "prompt": "", "text": row["text"]} for i, row in enumerate(texts)]

    knowmem = []
    for part in ("forget", "retain"):
        for name, fixed in ((f"{part}_qa", None), (f"{part}_qa_icl", CONTEXT)):
            for number, row in enumerate(rows("knowmem", name, "question", "answer")):
                pair = {"question": row["question"], "answer": row["answer"]}
                split = fixed or dev_or_test(row["question"])
                knowmem.append({"id": f"{name}/{number}", "part": part, "split": split, **pair})
        solved = {row["question"] for row in knowmem if row["part"] == part and row["split"] == CONTEXT}
        if both := [row for row in knowmem if row["split"] != CONTEXT and row["question"] in solved]:
            where = f"{repository}: {len(both)} questions of {part}_qa"
            print(f"{where} are left out: they stand solved before the others, in {part}_qa_icl", file=sys.stderr)
            knowmem = [row for row in knowmem if row not in both]
    prompts = rows("verbmem", "forget", "prompt", "gt")
    verbmem = [
        {"id": f"verbmem/{number}", "split": split, "prompt": row["prompt"], "gt": row["gt"]}
        for number, (row, split) in enumerate(zip(prompts, halves([row["prompt"] for row in prompts]), strict=True))
    ]
    for name in ("verbmem", "forget_qa", "retain_qa"):
        asked = [row for row in verbmem + knowmem if row["id"].startswith(f"{name}/")]
        if missing := {"dev", "test"} - {row["split"] for row in asked}:
            raise ConfigError(
                f"{repository}: none of the {len(asked)} rows of {name} is of the split {min(missing)!r}, which a hash "
                "of the text decides; add rows"
            )
    forget, retain = documents("forget"), documents("retain1")
    for corpus in (forget, retain):
        random.Random(0).shuffle(corpus)
    privleak = [
        {"id": f"{part}/{number}", "part": part, "text": row["text"]}
        for part in ("forget", "retain", "holdout")
        for number, row in enumerate(rows("privleak", part, "text"))
    ]
    return {
        "forget_corpus": forget,
        "retain_corpus": retain,
        "held_out_corpus": documents("retain2"),
        "knowmem": knowmem,
        "verbmem": verbmem,
        "privleak": privleak,
    }
