"""`gripmoe rewrite`: forget questions in the words of a local language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from gripmoe.attacks.prompts import INSTRUCTIONS, other_questions, rewrites_by
from gripmoe.cli.options import OutputFile, read_file
from gripmoe.config.models import PublishedModel
from gripmoe.evaluation.questions import load_questions
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_jsonl, write_jsonl
from gripmoe.moe.placement import place, visible_devices
from gripmoe.moe.storage import load_published

AT_ONCE = 32


def rewrite(
    *,
    model_name: Annotated[str, typer.Option("--model", help="A folder, or an id of the hub.")],
    questions_file: Annotated[Path, read_file("--questions", "The forget questions of a benchmark.")],
    output: OutputFile,
    style: Annotated[
        str, typer.Option("--style", help=f"An instruction, or one of these: {', '.join(INSTRUCTIONS)}.")
    ] = "verse",
) -> None:
    """Have a local language model rewrite forget questions, for the prompt attacks.

    Name the output under the key `rewrites` of a benchmark. An interrupted command continues after the
    questions that the output has.

    \b
    Example:
      gripmoe rewrite --model Qwen/Qwen3-1.7B --questions data/forget_questions.jsonl --output verse.jsonl
    """
    instruction = INSTRUCTIONS.get(style, style)
    questions = load_questions(questions_file, "test")
    done = read_jsonl(output, "id") if output.exists() else []
    asked = {"by": model_name, "instruction": instruction}
    if any({key: row.get(key) for key in asked} != asked for row in done):
        raise ConfigError(f"{output}: holds rewrites by another model or instruction; remove it, or name another file")
    known = {row["id"]: {"question_digest": None, **row} for row in done}
    if other := other_questions(known, questions):
        raise ConfigError(
            f"{output}: the rewrite of {other[0]!r} is not of the question in {questions_file}; remove the "
            "file, or name another"
        )
    left = [question for question in questions if question["id"] not in known]
    if left:
        model, tokenizer = load_published(PublishedModel(source="published", id=model_name))
        if hasattr(getattr(model, "model", None), "layers"):
            place(model, visible_devices())
        else:  # of a layout that `place` cannot split, such as GPT-2's
            model.to(visible_devices()[0])
    unchanged = 0
    with tqdm(total=len(questions), initial=len(done), desc="rewriting") as bar:
        for start in range(0, len(left), AT_ONCE):
            some = left[start : start + AT_ONCE]
            rows = rewrites_by(model, tokenizer, some, instruction)
            unchanged += sum(not row["rewrite"] for row in rows)
            write_jsonl(output, done := [*done, *({**row, **asked} for row in rows)])
            bar.update(len(some))
    print(f"{output}: {len(done)} prompts; name it under `rewrites:` of the benchmark")
    if unchanged:
        print(f"to {unchanged} questions the model wrote nothing, or did not end; they keep their words")
