"""Tries the settings of tuning.yaml and prints which one would be chosen for each method.

    python workflow/tune.py --world tiny_tuning --cores 2 [--objectives gd] [--methods anchored]

Every method of an objective tries the same settings with the same seeds. The chosen setting reaches the forget target
in every trial and has the highest mean minus standard deviation of retain accuracy, both on dev questions; of equal
settings, the one of the fewest steps is chosen. A table in the folder `tuning` lists every trial. The configuration is
not changed: its values are entered by hand, with their provenance. Snakemake first makes the models, data and traces
that are missing in the world's results folder. A finished trial is not repeated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
from shared import CONFIG, ROOT, command, snakemake
from tqdm import tqdm

from gripmoe.cli.common import identity_of
from gripmoe.cli.fit_basis import fit_basis
from gripmoe.cli.unlearn import unlearn
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.project import Project
from gripmoe.config.provenance import entry_of
from gripmoe.config.reading import parse_as
from gripmoe.config.training import Training
from gripmoe.config.world import Run
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, read_yaml, write_json, write_yaml

TUNING = Path(__file__).with_name("tuning.yaml")
RETAIN = {"letters": "retain_accuracy", "news": "knowmem_retain"}  # decides among runs that have forgotten
SCORES = ("forget_accuracy", "verbmem", "knowmem_forget", *RETAIN.values())
LOG = ["model", "objective", "method", "setting", "seed", *SCORES, "status", "steps", "chosen"]


def prepare(project: Project, results: Path, models: list[str], benchmark: str, cores: int) -> None:
    """Makes the models, data and traces that are missing."""
    retrained = [name for model in models if (name := project.models[model].retrained)]
    targets = [results / "models" / name / "model.json" for name in retrained]
    targets += [results / model / benchmark / "routing.json" for model in models]
    if subprocess.run(snakemake(str(project.world_file), targets, cores), cwd=ROOT).returncode:
        raise SystemExit("snakemake could not make the models, data and traces of the trials; its message is above")


def trial(
    project: Project, results: Path, model: str, benchmark: str, objective: str, method: str, seed: int, change: dict
) -> dict:
    """Dev scores of one setting: `change` changes Training and the objective's own settings."""
    run = changed(project.run(model, benchmark, objective, method, seed), change)
    setting = named(change)
    folder = results / "tuning" / model / benchmark / objective / method / setting / str(seed)
    train(project, results, run, folder)
    last, outcome = read_json(folder / "history.json")[-1], read_json(folder / "checkpoint.json")
    scores = {key: last[key] for key in SCORES if key in last}
    tried = {"model": model, "objective": objective, "method": method, "setting": setting, "seed": seed}
    return {**tried, **scores, "status": outcome["status"], "steps": outcome["steps"]}


def changed(run: Run, change: dict) -> Run:
    settings = run.training.model_dump()
    for key, value in change.items():
        (settings if key in Training.model_fields else settings["objective"])[key] = value
    return run.model_copy(update={"training": Training(**settings)})


def named(change: dict) -> str:
    return "_".join(f"{key}-{value}" for key, value in change.items())


def train(project: Project, results: Path, run: Run, folder: Path) -> None:
    """Unlearns in a folder, unless this very run of the same models and data by the same code has ended there."""
    if run.processes > 1:
        raise SystemExit(f"{project.world_file}: a trial trains in one process; set `gpus` of {run.model} to 1")
    recorded, data = results / run.model / run.benchmark_name, results / "data" / run.benchmark_name
    traces = {"trace": recorded / "routing.safetensors", "forget-trace": recorded / "routing_forget.safetensors"}
    models = {"model": results / "models" / run.model / "model.json"}
    if retrained := project.models[run.model].retrained:
        models["retrained"] = results / "models" / retrained / "model.json"
    asked = run.model_dump(mode="json")
    made_with = identity_of(
        unlearn,
        *traces.values(),
        *sorted(data.glob("*.jsonl")),
        weights=[read_json(model)["weights"] for model in models.values()],
        bases=code_fingerprint(entry_of(fit_basis)),
    )
    known = folder / "trained_with.json"
    if (folder / "checkpoint.json").exists() and known.exists():
        if read_yaml(folder / "run.yaml") == asked and read_json(known) == made_with:
            return
    (folder / "checkpoint.json").unlink(missing_ok=True)
    write_yaml(folder / "run.yaml", asked)
    write_json(known, made_with)
    made = {}
    if run.method.has_bases:
        made["bases"], axes = folder / "bases.safetensors", run.method.model_dump_json()
        flags = dict(settings=axes, digest=folder / "bases.json", output=made["bases"])
        command("fit-basis", model=models["model"], **traces, **flags)
    output = folder / "checkpoint.json"
    command("unlearn", **models, **traces, **made, run=folder / "run.yaml", data=data, output=output)


def chosen(table: pd.DataFrame, score: str) -> pd.Series:
    """Which rows are of the best setting of their objective and method: of those that reach the target in every trial,
    the one of the highest mean score minus its standard deviation; of equal ones, the one of the fewest steps."""
    setting = ["objective", "method", "setting"]
    trials = table.groupby(setting)
    worth = (trials[score].mean() - trials[score].std(ddof=1).fillna(0.0)).round(6)
    judged = pd.DataFrame({"worth": worth, "steps": trials.steps.mean()})
    judged = judged[trials.status.agg(lambda status: (status == "reached").all())]
    best = judged.sort_values(["worth", "steps"], ascending=[False, True]).groupby(level=setting[:2]).head(1)
    return pd.Series(pd.MultiIndex.from_frame(table[setting]).isin(best.index), table.index)


def grid(values: dict[str, list]) -> list[dict]:
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", default="tiny_tuning")
    parser.add_argument("--benchmark", default="wmdp_tiny")
    parser.add_argument("--objectives", nargs="*", help="all if absent")
    parser.add_argument("--methods", nargs="*", help="all if absent")
    parser.add_argument("--models", nargs="*", help="all of the world if absent")
    parser.add_argument("--cores", type=int, default=1, help="trials side by side")
    args = parser.parse_args()
    try:
        project, tuning = Project(CONFIG, args.world), read_yaml(TUNING)
    except ConfigError as error:
        parser.error(str(error))
    objectives = tuning["benchmarks"].get(args.benchmark, {})
    methods = {name for row in objectives.values() for name in row["methods"]}
    for flag, given, known in (
        ("--benchmark", [args.benchmark], set(project.world.benchmarks) & tuning["benchmarks"].keys()),
        ("--models", args.models or [], project.world.models),
        ("--objectives", args.objectives or [], objectives),
        ("--methods", args.methods or [], sorted(methods)),
    ):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{flag}: {unknown[0]!r} is none of {', '.join(known)}, which world and tuning.yaml name")
    models = args.models or project.world.models
    results = ROOT / project.results
    trials = [
        (project, results, model, args.benchmark, objective, method, seed, change)
        for objective in args.objectives or objectives
        for method in objectives[objective]["methods"]
        if method in (args.methods or methods)
        for change in grid(objectives[objective]["settings"])
        for model in models
        for seed in tuning["seeds"]
    ]
    if not trials:
        parser.error("tuning.yaml tries no such method under these objectives")
    try:
        for _, _, *key, change in trials:
            run = changed(project.run(*key), change)
            parse_as(project.objectives[run.objective].settings, run.training.objective, TUNING)
    except ValueError as error:
        parser.error(str(error))
    prepare(project, results, models, args.benchmark, args.cores)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # trials that run side by side share the cores
    with ProcessPoolExecutor(args.cores, mp_context=get_context("spawn")) as pool:
        rows = list(tqdm(pool.map(trial, *zip(*trials, strict=True)), total=len(trials)))
    table = pd.DataFrame(rows)
    table["chosen"] = chosen(table, RETAIN[project.benchmarks[args.benchmark].data.kind])
    name = "_".join([args.benchmark, *(args.models or []), *(args.objectives or []), *(args.methods or [])])
    table = table[[column for column in LOG if column in table]].round(3)
    table.to_csv(results / "tuning" / f"{name}.csv", index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
