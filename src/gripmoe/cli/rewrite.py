"""Forget questions in the words of a local language model, for the prompt attacks."""

from __future__ import annotations

from tqdm import tqdm

from gripmoe.attacks.prompts import INSTRUCTIONS, rewrites_by
from gripmoe.config.models import PublishedModel
from gripmoe.evaluation.questions import load_questions
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_jsonl, write_jsonl
from gripmoe.moe.storage import load_published

AT_ONCE = 32


def rewrite(args) -> None:
    """Has the model at `args.model` (a folder, or an id of the hub) rewrite the reported forget questions, and writes
    prompts that `rewrites:` of a benchmark may name. Interrupted, it goes on after what its file holds; with other
    words asked for it needs another file. Raises ConfigError if the file holds something else."""
    instruction = INSTRUCTIONS.get(args.style, args.style)
    questions = load_questions(args.questions, "test")
    done = read_jsonl(args.output) if args.output.exists() else []
    asked = {"by": args.model, "instruction": instruction}
    if any({key: row.get(key) for key in asked} != asked for row in done):
        raise ConfigError(
            f"{args.output}: holds rewrites by another model or instruction; remove it, or name another file"
        )
    left = [question for question in questions if question["id"] not in {row["id"] for row in done}]
    model, tokenizer = load_published(PublishedModel(source="published", id=args.model))
    unchanged = 0
    with tqdm(total=len(questions), initial=len(done), desc="rewriting") as bar:
        for start in range(0, len(left), AT_ONCE):
            some = left[start : start + AT_ONCE]
            rows = rewrites_by(model, tokenizer, some, instruction)
            unchanged += sum(not row["rewrite"] for row in rows)
            write_jsonl(args.output, done := [*done, *({**row, **asked} for row in rows)])
            bar.update(len(some))
    print(f"{args.output}: {len(done)} prompts; name it under `rewrites:` of the benchmark")
    if unchanged:
        print(f"to {unchanged} questions the model wrote nothing; they keep their words")
