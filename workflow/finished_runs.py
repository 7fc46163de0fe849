"""Measures finished runs of letter questions by their weights, which lie below `--results`. A row begins with the key
of its run.

    python workflow/finished_runs.py readable_depth --worlds record_main tiny_erasure --output depth.csv
    python workflow/finished_runs.py longer_relearning --worlds tiny_erasure_held_out --output longer.csv
    python workflow/finished_runs.py expert_attribution --methods original retrained frozen_router --output experts.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from shared import CONFIG
from tqdm import tqdm

from gripmoe.attacks.base import SAMPLE, Found, QuestionSetting, mean
from gripmoe.attacks.relearning import from_other_facts, of_low_rank_experts
from gripmoe.attacks.restoration import read_above, without_expert
from gripmoe.config.project import Project
from gripmoe.config.reading import require_known
from gripmoe.config.world import RunKey
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_text
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.reporting import names


def readable_depth(setting: QuestionSetting) -> list[dict]:
    """How much the upper layers of the original read from the states of this model: two rows for each decoder layer but
    the last, the original's accuracy on forget and on retain questions, when embeddings and layers up to this one are
    this model's."""
    found = {}
    for name, questions in (("", setting.sample), ("retain_", setting.retain[:SAMPLE])):
        read = read_above(setting.before, setting.after, lambda moe, asked=questions: setting.right(moe, asked))
        found |= {f"{name}read_above_layer_{layer}": mean(scores) for layer, scores in read.items()}
    return [{"metric": name, "value": value} for name, value in found.items()]


def longer_relearning(setting: QuestionSetting) -> list[dict]:
    """What relearning of more steps returns: a row for each number of steps on other forget facts, of all weights
    (`relearned_after_<step>`) and of low-rank updates to experts (`relearned_lora_after_<step>`)."""
    found = Found.joined(attack(setting) for attack in (from_other_facts, of_low_rank_experts)).metrics
    return [{"metric": name, "value": value} for name, value in found.items() if not name.endswith("_0")]


def expert_attribution(setting: QuestionSetting) -> list[dict]:
    """How much each expert contributes to answers: a row for each expert of each layer. `forget` and `retain` are in
    nats: by how much the probability of the right letter among the four, as a mean logarithm over questions, falls when
    the expert's output is zero."""
    moe, asked = setting.after, {"forget": setting.sample, "retain": setting.retain[:SAMPLE]}

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


MEASURES = {each.__name__: each for each in (readable_depth, longer_relearning, expert_attribution)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--worlds", nargs="+", default=["tiny_erasure"])
    parser.add_argument("--methods", nargs="+", help="all if absent")
    parser.add_argument("--objectives", nargs="+", help="all if absent; original and retrained models have `none`")
    parser.add_argument("--steps", nargs="+", type=int, default=[20, 50, 100], help="of longer_relearning")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--results", type=Path, help="results/ of each world if absent")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    try:
        found = chosen(args)
    except ConfigError as error:
        parser.error(str(error))
    rows = []
    for key, (project, results, weights) in tqdm(found.items(), unit="run"):
        relearning = project.world.relearning
        finetuning = relearning and relearning.model_copy(update={"steps": args.steps})
        setting = setting_of(project, results, key, weights, finetuning=finetuning)
        rows += [{**key._asdict(), **row} for row in MEASURES[args.measure](setting)]
    write_text(args.output, pd.DataFrame(rows).to_csv(index=False, float_format="%.6g"))


def chosen(args: argparse.Namespace) -> dict[RunKey, tuple[Project, Path, Path]]:
    """The chosen runs whose weights are there. Raises ConfigError if there is none."""
    found, projects = {}, [Project(args.config, world) for world in args.worlds]
    for name in ("objective", "method"):
        known = {getattr(key, name) for project in projects for key in project.run_keys()}
        for given in getattr(args, f"{name}s") or []:
            require_known(given, known, f"--{name}s")
    for project in projects:
        if args.measure == "longer_relearning" and project.world.relearning is None:
            raise ConfigError(f"{project.world_file}: give `relearning`, the settings of finetuning")
        results = args.results or project.results
        for key in project.run_keys():
            asked = args.objectives is None or key.objective in args.objectives
            asked &= args.methods is None or key.method in args.methods
            weights = _weights(project, results, key)
            if asked and not project.benchmarks[key.benchmark].is_news and weights.exists():
                found[key] = project, results, weights
    if not found:
        folders = ", ".join(sorted({str(args.results or project.results) for project in projects}))
        raise ConfigError(f"no run of {', '.join(args.worlds)} has weights in {folders}; snakemake makes them")
    return found


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


if __name__ == "__main__":
    main()
