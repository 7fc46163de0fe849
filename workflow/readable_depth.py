"""Measures how much the upper layers of an original model read from the states of unlearned models.

    python workflow/readable_depth.py --worlds record_main tiny_erasure --output readable_depth.csv

Runs count whose weights are below `--results`. A run has two rows for each decoder layer but the last: the accuracy of
the original model on forget questions, and on retain questions, when embeddings and layers up to this one are the
unlearned model's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from gripmoe.attacks.base import SAMPLE, Letters, mean
from gripmoe.attacks.restoration import read_above
from gripmoe.config.grid import Project
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_text
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.reporting import names
from gripmoe.reporting.runs import KEYS

CONFIG = Path(__file__).parent / "config"


def weights_of(project: Project, results: Path, key: tuple) -> Path:
    model, *_, method, _ = key
    if method in names.ORIGINALS:
        name = model if method == "original" else project.models[model].retrained
        return results / "models" / name / "weights"
    return results.joinpath(*map(str, key), "weights")


def runs_with_weights(config: Path, worlds: Sequence[str], results: Path) -> dict[tuple, tuple]:
    """By key, the arguments of `measure` for each run of letter questions whose weights are there. Raises ConfigError
    without such runs."""
    found = {}
    for project in (Project(config, world) for world in worlds):
        letters = [key for key in map(tuple, project.run_keys()) if not project.benchmarks[key[1]].is_news]
        found |= {key: (project, results, key, weights_of(project, results, key)) for key in letters}
    there = {key: run for key, run in found.items() if run[-1].exists()}
    if not there:
        raise ConfigError(f"no run of {', '.join(worlds)} has weights in {results}; snakemake makes them")
    return there


def measure(project: Project, results: Path, key: tuple, weights: Path) -> list[dict]:
    model, benchmark, *_ = key
    (before, _), (after, tokenizer) = (
        load_model(folder, device="cpu") for folder in (results / "models" / model / "weights", weights)
    )
    data = results / "data" / benchmark
    setting = Letters(MoEModel(before), MoEModel(after), tokenizer, data, project.benchmarks[benchmark])
    found = {}
    for name, questions in (("", setting.sample), ("retain_", setting.retain[:SAMPLE])):
        read = read_above(setting.before, setting.after, lambda moe, asked=questions: setting.right(moe, asked))
        found |= {f"{name}read_above_layer_{layer}": mean(scores) for layer, scores in read.items()}
    return [{**dict(zip(KEYS, key, strict=True)), "metric": name, "value": value} for name, value in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=["record_main"])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--results", type=Path, default=Path("results/tiny"))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    try:
        runs = runs_with_weights(args.config, args.worlds, args.results)
    except ConfigError as error:
        parser.error(str(error))
    for run in tqdm(runs.values(), unit="run"):
        rows += measure(*run)
    write_text(args.output, pd.DataFrame(rows).to_csv(index=False, float_format="%.6g"))


if __name__ == "__main__":
    main()
