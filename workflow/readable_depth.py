"""Measures how much the upper layers of an original model read from the states of unlearned models.

    python workflow/readable_depth.py --worlds record_main tiny_erasure --output readable_depth.csv

Runs count whose weights are below `--results`. A run has two rows for each decoder layer but the last: the accuracy of
the original model on forget questions, and on retain questions, when embeddings and layers up to this one are the
unlearned model's.
"""

from __future__ import annotations

from pathlib import Path

from finished_runs import parser_of, setting_of, write_measurements

from gripmoe.attacks.base import SAMPLE, mean
from gripmoe.attacks.restoration import read_above
from gripmoe.config.project import Project
from gripmoe.config.world import RunKey


def measure(project: Project, results: Path, key: RunKey, weights: Path) -> list[dict]:
    setting = setting_of(project, results, key, weights)
    found = {}
    for name, questions in (("", setting.sample), ("retain_", setting.retain[:SAMPLE])):
        read = read_above(setting.before, setting.after, lambda moe, asked=questions: setting.right(moe, asked))
        found |= {f"{name}read_above_layer_{layer}": mean(scores) for layer, scores in read.items()}
    return [{"metric": name, "value": value} for name, value in found.items()]


def main() -> None:
    write_measurements(parser_of(__doc__, ["record_main"]), measure)


if __name__ == "__main__":
    main()
