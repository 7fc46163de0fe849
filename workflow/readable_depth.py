"""Measures at which depth of a network forget facts are still readable, of the runs of a world that are there.

    python workflow/readable_depth.py --world record_main --results results/tiny --output readable_depth.csv

A run has a row for each number of layers: the forget accuracy of the original model when that many of its layers are
the unlearned model's (`gripmoe.attacks.restoration.readable_depth`). A run that the output has is not measured again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from gripmoe.attacks.base import Letters
from gripmoe.attacks.restoration import readable_depth
from gripmoe.config.grid import Project
from gripmoe.io.files import write_text
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.reporting import names
from gripmoe.reporting.collect import KEYS


def weights_of(project: Project, results: Path, key: tuple) -> Path:
    model, *_, method, _ = key
    if method in names.ORIGINALS:
        name = model if method == "original" else project.models[model].retrained
        return results / "models" / name / "weights"
    return results.joinpath(*map(str, key), "weights")


def measure(project: Project, results: Path, key: tuple, weights: Path) -> list[dict]:
    model, benchmark, *_ = key
    before, _ = load_model(results / "models" / model / "weights", device="cpu")
    after, tokenizer = load_model(weights, device="cpu")
    data = results / "data" / benchmark
    setting = Letters(MoEModel(before), MoEModel(after), tokenizer, data, project.benchmarks[benchmark])
    found = readable_depth(setting).metrics
    return [{**dict(zip(KEYS, key, strict=True)), "metric": name, "value": value} for name, value in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="record_main")
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "config")
    parser.add_argument("--results", type=Path, default=Path("results/tiny"))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    project = Project(args.config, args.world)
    rows = pd.read_csv(args.output).to_dict("records") if args.output.exists() else []
    measured = {tuple(row[name] for name in KEYS) for row in rows}
    weights = {key: weights_of(project, args.results, key) for key in map(tuple, project.run_keys())}
    there = {key: path for key, path in weights.items() if path.exists() and key not in measured}
    if not measured and not there:
        parser.error(f"--results: no run of {args.world} has weights in {args.results}; snakemake makes them")
    for key, path in tqdm(there.items(), unit="run"):
        rows += measure(project, args.results, key, path)
        write_text(args.output, pd.DataFrame(rows).to_csv(index=False, float_format="%.6g"))


if __name__ == "__main__":
    main()
