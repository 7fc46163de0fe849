"""What the scripts share that measure finished runs by their weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from gripmoe.config.grid import Project
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_text
from gripmoe.reporting import names
from gripmoe.reporting.runs import KEYS

CONFIG = Path(__file__).parent / "config"
Measure = Callable[[Project, Path, tuple, Path], list[dict]]  # of a run's results, key and weights


def parser_of(description: str, worlds: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=worlds)
    parser.add_argument("--methods", nargs="+", help="all if absent")
    parser.add_argument("--objectives", nargs="+", help="all if absent; original and retrained models have `none`")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--results", type=Path, default=Path("results/tiny"))
    parser.add_argument("--output", type=Path, required=True)
    return parser


def write_measurements(parser: argparse.ArgumentParser, measure: Measure) -> None:
    """Writes the rows of `measure` for all chosen runs of letter questions whose weights are below `--results`; each
    row begins with the run's key. Ends with an error if there is none."""
    args = parser.parse_args()
    try:
        found = {}
        for project in (Project(args.config, world) for world in args.worlds):
            for key in map(tuple, project.run_keys()):
                chosen = key[2] in (args.objectives or [key[2]]) and key[3] in (args.methods or [key[3]])
                weights = _weights(project, args.results, key)
                if chosen and not project.benchmarks[key[1]].is_news and weights.exists():
                    found[key] = project, args.results, key, weights
        if not found:
            raise ConfigError(f"no run of {', '.join(args.worlds)} has weights in {args.results}; snakemake makes them")
    except ConfigError as error:
        parser.error(str(error))
    rows = []
    for key, run in tqdm(found.items(), unit="run"):
        rows += [{**dict(zip(KEYS, key, strict=True)), **row} for row in measure(*run)]
    write_text(args.output, pd.DataFrame(rows).to_csv(index=False, float_format="%.6g"))


def _weights(project: Project, results: Path, key: tuple) -> Path:
    model, *_, method, _ = key
    if method in names.ORIGINALS:
        name = model if method == "original" else project.models[model].retrained
        return results / "models" / name / "weights"
    return results.joinpath(*map(str, key), "weights")
