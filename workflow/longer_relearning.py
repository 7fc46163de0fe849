"""Measures what relearning returns that takes more steps than the attacks of a run.

    python workflow/longer_relearning.py --worlds tiny_erasure_held_out --steps 20 50 100 --output longer_relearning.csv

Runs count whose weights are below `--results`. A run has a row for each number of steps on other forget facts, of all
weights (`relearned_after_<step>`) and of low-rank updates to experts (`relearned_lora_after_<step>`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from finished_runs import parser_of, setting_of, write_measurements

from gripmoe.attacks.base import Found
from gripmoe.attacks.relearning import from_other_facts, of_low_rank_experts
from gripmoe.config.project import Project
from gripmoe.config.world import RunKey


def measure(project: Project, results: Path, key: RunKey, weights: Path, steps: Sequence[int]) -> list[dict]:
    if project.world.relearning is None:
        raise SystemExit(f"{project.world_file}: give `relearning`, the settings of finetuning")
    finetuning = project.world.relearning.model_copy(update={"steps": list(steps)})
    setting = setting_of(project, results, key, weights, finetuning=finetuning)
    found = Found.joined(attack(setting) for attack in (from_other_facts, of_low_rank_experts)).metrics
    return [{"metric": name, "value": value} for name, value in found.items() if not name.endswith("_0")]


def main() -> None:
    parser = parser_of(__doc__, ["tiny_erasure_held_out"])
    parser.add_argument("--steps", nargs="+", type=int, default=[20, 50, 100])
    write_measurements(parser, partial(measure, steps=parser.parse_args().steps))


if __name__ == "__main__":
    main()
