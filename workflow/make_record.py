"""Computes the runs of the record that are missing and writes what is there to docs/record.

    python workflow/make_record.py [--cores 2] [--hours 2] [--worlds record_main record_rates] [--add]

It says first how long it takes, from docs/record/step_times.csv and the runs that are there. A block is one seed and
objective over all base models, so that a record that is stopped early covers all base models. A finished step is not
repeated. `--hours` ends it after that time, with the steps that then run. `--add` computes only runs that docs/record
lacks, and keeps those that it has.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
from shared import CONFIG, ROOT, command, snakemake
from tqdm import tqdm

from gripmoe.config.project import Project
from gripmoe.config.provenance import step_seconds
from gripmoe.config.world import NO_OBJECTIVE, RunKey
from gripmoe.reporting import TABLES
from gripmoe.reporting.collect import base_models
from gripmoe.reporting.runs import KEYS, load_runs

RECORD = ROOT / "docs" / "record" / "runs.csv"
TIMES = RECORD.with_name("step_times.csv")
WORLDS = ("record_main", "record_rates", "record_settings", "record_matched", "record", "record_muse")
LAST_STEP = "attack.json"
POLL_SECONDS = 5


def blocks(project: Project) -> Iterator[tuple[str, list[RunKey]]]:
    """The runs of a world in the order in which they are computed: by seed, then objective. The runs without an
    objective, of models that nobody unlearned, belong to every block."""
    keys = project.run_keys()
    originals = [key for key in keys if key.objective == NO_OBJECTIVE]
    for seed in project.world.seeds:
        for objective in project.world.objectives:
            of_block = [key for key in keys if (key.objective, key.seed) == (objective, seed)]
            yield f"{project.name}, {objective}, seed {seed}", originals + of_block


def step_times(results: Path) -> pd.Series:
    """Mean CPU-seconds of a step, by its name: of the steps under `results`, else of the record's."""
    of_record = pd.read_csv(TIMES).set_index("step").cpu_seconds if TIMES.exists() else pd.Series(dtype=float)
    measured = pd.Series({step: fmean(each) for step, each in step_seconds(results).items()}, dtype=float)
    return measured.combine_first(of_record)


def recorded() -> set[RunKey]:
    """The runs of the record."""
    keys = load_runs(RECORD, kind=None)[KEYS].drop_duplicates()
    return set(map(RunKey._make, keys.itertuples(index=False, name=None)))


def require_same_models(results: Path) -> None:
    """Raises SystemExit if a base model under `results` has other scores than in the record, or other weights where the
    record has their digest. Runs of one base model are compared in pairs, so they need the same weights."""
    here, there = (base_models(folder) for folder in (results, RECORD.parent))
    if here.empty or there.empty:
        return
    here, there = (models.set_index("model").drop(columns="cpu_seconds") for models in (here, there))
    both = here.index.intersection(there.index)
    scores = here.select_dtypes("number").columns.intersection(there.columns)
    alike = np.isclose(here.loc[both, scores], there.loc[both, scores], rtol=1e-3, equal_nan=True).all(axis=1)
    if "weights" in here and "weights" in there:
        digests = there.loc[both, "weights"]
        alike &= (digests.isna() | (digests == here.loc[both, "weights"])).to_numpy()
    if not alike.all():
        raise SystemExit(
            f"{', '.join(both[~alike])}: other models than in {RECORD.with_name('base_models.csv')}. Another kind of "
            "CPU trains other base models, whose runs cannot be added; without --add they replace the record"
        )


def missing(project: Project, results: Path, kept: Collection[RunKey] = ()) -> list[RunKey]:
    """The runs of a world that neither `results` nor `kept` has."""
    return [k for k in project.run_keys() if k not in kept and not (results / k.folder / LAST_STEP).exists()]


def remaining(
    projects: list[Project], results: Path, times: pd.Series, kept: Collection[RunKey] = ()
) -> Iterator[float]:
    """CPU-seconds of the missing runs and base models of each world, without those of the worlds before it."""
    counted = set()
    for project in projects:
        seconds, runs = 0.0, set(missing(project, results, kept)) - counted
        for key in runs:
            seconds += sum(times.get(step, 0.0) for step in (project.methods[key.method].rule, "evaluate", "attack"))
        models = {name for name in project.models_needed if not (results / "models" / name / "model.json").exists()}
        yield seconds + len(models - counted) * times.get("prepare_model", 0.0)
        counted |= runs | models


def compute(world: str, targets: list[Path], cores: int, until: float | None, bar: tqdm) -> str:
    """Has Snakemake make the targets, and counts them on the bar. Returns "done", "failed" or "stopped": the time is
    up."""
    log = ROOT / "results" / f"record_{world}.log"
    pending = [target for target in targets if not target.exists()]
    log.parent.mkdir(exist_ok=True)
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(snakemake(world, targets, cores), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            done = [target for target in pending if target.exists()]
            bar.update(len(done))
            pending = [target for target in pending if target not in done]
            if until is not None and time.time() > until:
                process.send_signal(signal.SIGTERM)  # Snakemake waits for the steps that run
                process.wait()
                return "stopped"
    bar.update(sum(target.exists() for target in pending))
    if process.returncode:
        bar.write(f"some steps failed; {log.relative_to(ROOT)} says which")
        return "failed"
    return "done"


def collect(project: Project, results: Path, known: Path | None) -> Path | None:
    """Tables of the runs that are there, which are compared with those of the table `known` too."""
    runs = [results / key.folder for key in project.run_keys() if (results / key.folder / LAST_STEP).exists()]
    if not runs:
        return None
    output, *others = (results / f"{name}_{project.name}.csv" for name in TABLES)
    flags = dict(zip(TABLES[1:], others, strict=True)) | ({"known": known} if known else {})
    command("collect", *runs, output=output, **flags)  # exits if it fails, or the record would be of earlier tables
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--hours", type=float, help="as long as it takes if absent")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=WORLDS)
    parser.add_argument("--add", action="store_true", help="keeps the runs of docs/record; computes those it lacks")
    args = parser.parse_args()
    kept = recorded() if args.add else set()
    projects = [Project(CONFIG, world) for world in args.worlds]
    results = ROOT / projects[0].results
    times = step_times(results)
    until = None if args.hours is None else time.time() + 3600 * args.hours
    lacking = [missing(project, results, kept) for project in projects]
    for project, runs, left in zip(projects, lacking, remaining(projects, results, times, kept), strict=True):
        said = (
            f"about {left / args.cores / 3600:.1f} hours on {args.cores} cores" if len(times) else "no step was timed"
        )
        print(f"{project.name}: {len(runs)} of {len(project.run_keys())} runs are missing; {said}")
    ended, failed = "done", False
    for project, runs in zip(projects, lacking, strict=True):
        total = len(project.run_keys())
        with tqdm(total=total, initial=total - len(runs), unit="run", desc=project.name) as bar:
            for name, keys in blocks(project):
                bar.set_postfix_str(name.partition(", ")[2])
                targets = [results / key.folder / LAST_STEP for key in keys if key not in kept]
                if not targets:
                    continue
                of_block = compute(project.name, targets, args.cores, until, bar)
                if args.add:
                    require_same_models(results)
                failed |= of_block == "failed"
                if (ended := of_block) == "stopped":
                    break
        if ended == "stopped":
            break
    of_all = [Project(CONFIG, world) for world in WORLDS]  # a record holds all of them
    tables = [table for project in of_all if (table := collect(project, results, RECORD if args.add else None))]
    if not tables:
        raise SystemExit("no run has ended: there is nothing to record")
    if args.add:
        require_same_models(results)
        tables.append(RECORD)  # a run that both have comes from the new table
    subprocess.run([sys.executable, str(ROOT / "workflow" / "record.py"), *map(str, tables)], check=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
