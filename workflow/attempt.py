"""Tries settings of a method against relearning, in runs of equal length, and measures each.

    python workflow/attempt.py --method frozen_router --output attempts.csv \\
        --change '{"sharpness_radius": 0.01}' --change '{"sharpness_radius": 0.1}'

The setting to choose is the one that answers fewest dev questions after 10 steps on other forget facts
(`dev_relearned_after_10`), among those with a retain accuracy of at least 0.9 on dev questions. The other measured
columns are on test questions. A world may ask for more steps, as tiny_erasure_tuning does. Snakemake first makes the
model, data and traces that are missing in the world's results folder. A finished run is not trained again. A run that
diverges has a row without measurements.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
from finished_runs import setting_of
from shared import CONFIG, ROOT
from tqdm import tqdm
from tune import changed, named, prepare, train

from gripmoe.attacks import restoration
from gripmoe.attacks.base import QuestionSetting, mean
from gripmoe.attacks.relearning import from_other_facts, from_retain_documents, of_low_rank_experts
from gripmoe.config.project import Project
from gripmoe.config.reading import parse_as, require_known
from gripmoe.config.world import Run, RunKey
from gripmoe.data.corpora import in_batches
from gripmoe.evaluation.questions import load_questions
from gripmoe.geometry.routing import mean_stability, stability_by_layer
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_text

RETAIN_QUESTIONS = 400  # of the test split
# A repeated attempt replaces its row. Attempts are the same if these columns are.
SAME = ["model", "benchmark", "objective", "method", "seed", "change", "steps"]
MEASURED = [
    "dev_forget_accuracy",
    "dev_retain_accuracy",
    *(f"dev_relearned_after_{step}" for step in (10, 50, 100)),
    "forget_accuracy",
    "retain_accuracy",
    "routing_stability",
    "restored_router_all",
    *(f"relearned_{kind}after_{step}" for kind in ("", "from_retain_", "lora_") for step in (5, 10, 20, 50, 100)),
    "restored_experts_layer_0",
    "restored_experts_layer_1",
]


class Swapped(QuestionSetting):
    """Dev and test questions change places: all dev questions are asked, and the adversary relearns documents about the
    facts of test questions."""

    @cached_property
    def dev(self) -> list[dict]:
        return load_questions(self.data / "forget_questions.jsonl", "test")

    @cached_property
    def sample(self) -> list[dict]:
        return load_questions(self.data / "forget_questions.jsonl", "dev")


def run_of(project: Project, key: RunKey, steps: int, change: dict) -> Run:
    """The run with changed settings. Raises ValueError if they do not fit."""
    never = {"checks_to_stop": steps + 1}  # more than there are: every run takes all its steps
    run = changed(project.run(*key), {"max_steps": steps, **never, **change})
    known = project.objectives[run.objective].settings
    parse_as(known, run.training.objective, Path("--change"))
    return run


def attempt(project: Project, results: Path, key: RunKey, steps: int, change: dict) -> dict:
    run = run_of(project, key, steps, change)
    folder = results / "attempts" / key.folder / f"steps-{steps}_{named(change)}"
    train(project, results, run, folder)
    outcome = read_json(folder / "checkpoint.json")
    tried = dict(zip(SAME, (*key, json.dumps(change), steps), strict=True)) | {"status": outcome["status"]}
    if outcome["status"] == "diverged":
        return tried
    return tried | measured(project, results, key, folder / "weights")


def measured(project: Project, results: Path, key: RunKey, weights: Path) -> dict[str, float]:
    letters = setting_of(project, results, key, weights, finetuning=project.world.relearning)
    swapped = Swapped(**{field.name: getattr(letters, field.name) for field in fields(letters)})
    batches = in_batches(letters.corpus("held_out"), letters.tokenizer.pad_token_id)
    stability = stability_by_layer(letters.before.trace(batches), letters.after.trace(batches))
    asked = {
        "dev_forget_accuracy": swapped.sample,
        "dev_retain_accuracy": load_questions(letters.data / "retain_questions.jsonl", "dev"),
        "forget_accuracy": letters.sample,
        "retain_accuracy": load_questions(letters.data / "retain_questions.jsonl", "test")[:RETAIN_QUESTIONS],
    }
    found = {name: mean(letters.right(letters.after, questions)) for name, questions in asked.items()}
    found |= {"routing_stability": mean_stability(stability)}
    found |= {f"dev_{name}": value for name, value in from_other_facts(swapped).metrics.items()}
    for attack in (from_other_facts, from_retain_documents, of_low_rank_experts, restoration.attack):
        found |= attack(letters).metrics
    return {name: found[name] for name in MEASURED if name in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="tiny_erasure")
    parser.add_argument("--model", default="tiny_a")
    parser.add_argument("--benchmark", default="wmdp_tiny_erasure")
    parser.add_argument("--objective", default="unlikelihood")
    parser.add_argument("--method", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--change", action="append", type=json.loads, required=True, help="settings, as JSON; again")
    parser.add_argument("--output", type=Path, required=True, help="a table, to which rows are added")
    parser.add_argument("--cores", type=int, default=1, help="runs side by side")
    args = parser.parse_args()
    try:
        project = Project(CONFIG, args.world)
        for name in ("model", "benchmark", "objective", "method"):
            require_known(getattr(args, name), getattr(project, f"{name}s"), f"--{name}")
        key = RunKey(args.model, args.benchmark, args.objective, args.method, args.seed)
        if not project.fits(args.model, args.benchmark) or not project.methods[args.method].trains:
            raise ConfigError(f"no run {key}: give a benchmark of the model, and a method that trains")
        for change in args.change:
            run_of(project, key, args.steps, change)
    except ValueError as error:
        parser.error(str(error))
    results = ROOT / project.results
    prepare(project, results, [args.model], args.benchmark, args.cores)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # runs side by side share the cores
    with ProcessPoolExecutor(args.cores, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(attempt, project, results, key, args.steps, change) for change in args.change]
        for run in tqdm(as_completed(running), total=len(running)):
            if run.exception() is None:  # which is raised below, when the others have ended
                add_row(args.output, run.result())
    for run in running:
        run.result()
    print(args.output.read_text())


def add_row(output: Path, row: dict) -> None:
    known = [pd.read_csv(output)] if output.exists() else []
    table = pd.concat([*known, pd.DataFrame([row])]).drop_duplicates(SAME, keep="last")
    write_text(output, table.round(3).to_csv(index=False))


if __name__ == "__main__":
    main()
