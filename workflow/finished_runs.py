"""What the scripts share that measure finished runs by their weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from shared import CONFIG
from tqdm import tqdm

from gripmoe.attacks.base import QuestionSetting
from gripmoe.config.project import Project
from gripmoe.config.reading import require_known
from gripmoe.config.world import RunKey
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_text
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.reporting import names

Measure = Callable[[Project, Path, RunKey, Path], list[dict]]  # of a run's results, key and weights


def parser_of(description: str, worlds: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=worlds)
    parser.add_argument("--methods", nargs="+", help="all if absent")
    parser.add_argument("--objectives", nargs="+", help="all if absent; original and retrained models have `none`")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--results", type=Path, help="results/ of each world if absent")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def write_measurements(parser: argparse.ArgumentParser, measure: Measure) -> None:
    """Writes the rows of `measure` for all chosen runs of letter questions whose weights are below `--results`; each
    row begins with the run's key. Ends with an error if there is none."""
    args = parser.parse_args()
    try:
        found = {}
        projects = [Project(args.config, world) for world in args.worlds]
        for name in ("objective", "method"):
            known = {getattr(key, name) for project in projects for key in project.run_keys()}
            for given in getattr(args, f"{name}s") or []:
                require_known(given, known, f"--{name}s")
        for project in projects:
            results = args.results or project.results
            for key in project.run_keys():
                chosen = args.objectives is None or key.objective in args.objectives
                chosen &= args.methods is None or key.method in args.methods
                weights = _weights(project, results, key)
                if chosen and not project.benchmarks[key.benchmark].is_news and weights.exists():
                    found[key] = project, results, key, weights
        if not found:
            folders = ", ".join(sorted({str(args.results or project.results) for project in projects}))
            raise ConfigError(f"no run of {', '.join(args.worlds)} has weights in {folders}; snakemake makes them")
    except ConfigError as error:
        parser.error(str(error))
    rows = []
    for key, run in tqdm(found.items(), unit="run"):
        rows += [{**key._asdict(), **row} for row in measure(*run)]
    write_text(args.output, pd.DataFrame(rows).to_csv(index=False, float_format="%.6g"))


def setting_of(project: Project, results: Path, key: RunKey, weights: Path, **given) -> QuestionSetting:
    """A run of letter questions under attack, beside its original."""
    (before, _), (after, tokenizer) = (
        load_model(folder, device="cpu") for folder in (results / "models" / key.model / "weights", weights)
    )
    data, row = results / "data" / key.benchmark, project.benchmarks[key.benchmark]
    return QuestionSetting(MoEModel(before), MoEModel(after), tokenizer, data, row, key.seed, **given)


def _weights(project: Project, results: Path, key: RunKey) -> Path:
    if key.method in names.NOT_UNLEARNED:
        name = key.model if key.method == "original" else project.models[key.model].retrained
        return results / "models" / name / "weights"
    return results / key.folder / "weights"
