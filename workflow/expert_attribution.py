"""Measures how much each expert of a model contributes to the answers to forget and retain questions.

    python workflow/expert_attribution.py --worlds tiny_erasure --methods original retrained frozen_router \\
        --objectives none unlikelihood --output expert_attribution.csv

Runs count whose weights are below `--results`. A run has a row for each expert of each layer. `forget` and `retain` are
in nats: by how much the probability of the right letter among the four, as a mean logarithm over questions, falls when
the expert's output is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from finished_runs import parser_of, setting_of, write_measurements

from gripmoe.attacks.base import SAMPLE
from gripmoe.attacks.restoration import without_expert
from gripmoe.config.project import Project
from gripmoe.config.world import RunKey


def measure(project: Project, results: Path, key: RunKey, weights: Path) -> list[dict]:
    setting = setting_of(project, results, key, weights)
    moe = setting.after
    asked = {"forget": setting.sample, "retain": setting.retain[:SAMPLE]}

    def score(questions: Sequence[dict]) -> float:
        answers = setting.ask(moe, questions)
        letters_NL = torch.tensor([answer.letter_logprobs for answer in answers]).log_softmax(dim=1)
        return fmean(row[question["answer"]].item() for row, question in zip(letters_NL, questions, strict=True))

    whole, rows = {name: score(questions) for name, questions in asked.items()}, []
    for layer in moe.layers:
        for expert in range(moe.num_experts):
            with without_expert(moe, layer, expert):
                lost = {name: whole[name] - score(questions) for name, questions in asked.items()}
            rows.append({"layer": layer, "expert": expert, **lost})
    return rows


def main() -> None:
    write_measurements(parser_of(__doc__, ["tiny_erasure"]), measure)


if __name__ == "__main__":
    main()
