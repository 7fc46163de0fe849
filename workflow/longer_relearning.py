"""Measures what relearning returns that takes more steps than the attacks of a run.

    python workflow/longer_relearning.py --worlds tiny_erasure_held_out --steps 20 50 100 --output longer_relearning.csv

Runs count whose weights are below `--results`. A run has a row for each number of steps on other forget facts, of all
weights (`relearned_after_<step>`) and of low-rank updates to experts (`relearned_lora_after_<step>`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from readable_depth import CONFIG, runs_with_weights
from tqdm import tqdm

from gripmoe.attacks.base import Found, Letters
from gripmoe.attacks.relearning import from_other_facts, of_low_rank_experts
from gripmoe.config.grid import Project
from gripmoe.io.files import write_text
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.reporting.runs import KEYS


def measure(project: Project, results: Path, key: tuple, weights: Path, steps: Sequence[int]) -> list[dict]:
    model, tokenizer = load_model(weights, device="cpu")
    moe, benchmark = MoEModel(model), key[1]
    given = tokenizer, results / "data" / benchmark, project.benchmarks[benchmark]
    finetuning = project.world.relearning.model_copy(update={"steps": list(steps)})
    setting = Letters(moe, moe, *given, finetuning=finetuning)
    found = Found.joined(attack(setting) for attack in (from_other_facts, of_low_rank_experts)).metrics
    run = dict(zip(KEYS, key, strict=True))
    return [{**run, "metric": name, "value": value} for name, value in found.items() if not name.endswith("_0")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=["tiny_erasure_held_out"])
    parser.add_argument("--methods", nargs="+", help="all if absent")
    parser.add_argument("--steps", nargs="+", type=int, default=[20, 50, 100])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--results", type=Path, default=Path("results/tiny"))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    runs = runs_with_weights(args.config, args.worlds, args.results)
    chosen = [run for key, run in runs.items() if key[3] in (args.methods or [key[3]])]
    rows = [row for run in tqdm(chosen, unit="run") for row in measure(*run, args.steps)]
    write_text(args.output, pd.DataFrame(rows).to_csv(index=False, float_format="%.6g"))


if __name__ == "__main__":
    main()
