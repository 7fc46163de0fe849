"""`gripmoe audit`: a verdict and an HTML page on any unlearned checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gripmoe.auditing import run
from gripmoe.auditing.inputs import own_inputs
from gripmoe.auditing.plan import ATTACK_GROUPS, plan_of
from gripmoe.cli.options import read_file
from gripmoe.config.provenance import recorded
from gripmoe.config.reading import parse_settings
from gripmoe.config.training import Relearning
from gripmoe.io.errors import ConfigError


def audit(
    *,
    original: Annotated[str, typer.Option(help="Folder or hub id (owner/name@revision) of the original model.")],
    unlearned: Annotated[str, typer.Option(help="Folder or hub id of the unlearned model, or a PEFT adapter.")],
    output: Annotated[Path | None, typer.Option(file_okay=False, help="The folder to write to.")] = None,
    retrained: Annotated[str | None, typer.Option(help="A model that never saw the forget data.")] = None,
    forget: Annotated[str | None, typer.Option(help="A benchmark by name: wmdp_cyber, wmdp_tiny.")] = None,
    questions: Annotated[Path | None, read_file("--questions", "Forget questions, JSON lines.")] = None,
    retain_questions: Annotated[Path | None, read_file("--retain-questions", "Retain questions, JSON lines.")] = None,
    forget_text: Annotated[Path | None, read_file("--forget-text", "Documents to forget: JSON lines or text.")] = None,
    retain_text: Annotated[Path | None, read_file("--retain-text", "Documents to retain: JSON lines or text.")] = None,
    holdout_text: Annotated[Path | None, read_file("--holdout-text", "Documents that no model has seen.")] = None,
    attacks: Annotated[str | None, typer.Option(help=f"Some of {','.join(ATTACK_GROUPS)}. Default: all.")] = None,
    relearning: Annotated[
        str | None,
        typer.Option(metavar="JSON", help=f"Changed settings of relearning: {', '.join(Relearning.model_fields)}."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Minutes. The audit skips measurements that would end later.")
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that lies in a model's folder.")] = False,
    plan_only: Annotated[
        bool,
        typer.Option(help="Estimate minutes and GPU memory from config.json, and stop. For models in bf16 or fp16."),
    ] = False,
) -> None:
    """Measure and attack an unlearned model beside its original.

    Questions have `question`, four `choices` and `answer` (0 to 3, or A to D); documents have `text`. An interrupted
    audit continues with the next measurement.

    \b
    Example:
      gripmoe audit --original original --unlearned mine --output audit --questions forget.jsonl \\
          --retain-questions retain.jsonl --retain-text retain.txt --attacks forcing,relearning
    """
    if (forget and questions) or not (forget or questions or plan_only):
        raise ConfigError("--forget, --questions: give one of them, a benchmark's name or a file of questions")
    if forget and (Path(forget).suffix or Path(forget).is_file()):
        raise ConfigError(f"--forget {forget}: this takes a benchmark's name; give a file of questions by --questions")
    texts = forget_text, retain_text, holdout_text
    if forget and (retain_questions or any(texts)):
        raise ConfigError("--forget: a benchmark has questions and texts of its own; leave the files out")
    if (questions is None) != (retain_questions is None) or (any(texts) and questions is None):
        raise ConfigError("--questions, --retain-questions: questions of both kinds are needed; give two files")
    settings = None if relearning is None else parse_settings(dict[str, Any], relearning, "--relearning")
    chosen = None if attacks is None else [name.strip() for name in attacks.split(",")]
    if plan_only:
        if budget is not None:
            raise ConfigError("--budget: a plan has all measurements; leave the budget out, or --plan-only")
        given = {"original": original, "unlearned": unlearned} | ({"retrained": retrained} if retrained else {})
        asked = own_inputs(questions, retain_questions, *texts, settings) if questions else forget
        print(plan_of(given, asked, chosen, settings, trust_remote_code))
        return
    if output is None:
        raise ConfigError("--output: a folder to write to is needed, unless --plan-only is given")
    with recorded(output / "audit.provenance.json", audit, resumed=any(output.glob("state/*.json"))):
        report = run.audit(
            original,
            unlearned,
            forget=forget or questions,
            retain=retain_questions,
            forget_text=forget_text,
            retain_text=retain_text,
            holdout_text=holdout_text,
            retrained=retrained,
            attacks=chosen,
            relearning=settings,
            budget=budget,
            output=output,
            trust_remote_code=trust_remote_code,
        )
        report.save(output)
    print("\n".join([str(report), *(f"not made: {line}" for line in report.not_made), str(output / "index.html")]))
