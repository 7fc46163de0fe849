"""What the scripts share that measure finished runs by their weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from gripmoe.attacks.base import QuestionSetting
from gripmoe.config.grid import Project
from gripmoe.config.reading import require_known
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_text
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.reporting import names
from gripmoe.reporting.runs import KEYS

CONFIG = Path(__file__).parent / "config"
FLAGS = {2: "objectives", 3: "methods"}  # by their place in a run's key
Measure = Callable[[Project, Path, tuple, Path], list[dict]]  # of a run's results, key and weights


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
        known = {name: {key[place] for each in projects for key in each.run_keys()} for place, name in FLAGS.items()}
        for name, keys in known.items():
            for given in getattr(args, name) or []:
                require_known(given, keys, f"--{name}")
        for project in projects:
            results = args.results or Path("results", project.results_name)
            for key in map(tuple, project.run_keys()):
                chosen = key[2] in (args.objectives or [key[2]]) and key[3] in (args.methods or [key[3]])
                weights = _weights(project, results, key)
                if chosen and not project.benchmarks[key[1]].is_news and weights.exists():
                    found[key] = project, results, key, weights
        if not found:
            folders = ", ".join(sorted({str(args.results or Path("results", each.results_name)) for each in projects}))
            raise ConfigError(f"no run of {', '.join(args.worlds)} has weights in {folders}; snakemake makes them")
    except ConfigError as error:
        parser.error(str(error))
    rows = []
    for key, run in tqdm(found.items(), unit="run"):
        rows += [{**dict(zip(KEYS, key, strict=True)), **row} for row in measure(*run)]
    write_text(args.output, pd.DataFrame(rows).to_csv(index=False, float_format="%.6g"))


def setting_of(project: Project, results: Path, key: tuple, weights: Path, **given) -> QuestionSetting:
    """A run of letter questions under attack, beside its original."""
    model, benchmark, *_, seed = key
    (before, _), (after, tokenizer) = (
        load_model(folder, device="cpu") for folder in (results / "models" / model / "weights", weights)
    )
    data, row = results / "data" / benchmark, project.benchmarks[benchmark]
    return QuestionSetting(MoEModel(before), MoEModel(after), tokenizer, data, row, seed, **given)


def _weights(project: Project, results: Path, key: tuple) -> Path:
    model, *_, method, _ = key
    if method in names.ORIGINALS:
        name = model if method == "original" else project.models[model].retrained
        return results / "models" / name / "weights"
    return results.joinpath(*map(str, key), "weights")
