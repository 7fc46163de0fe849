"""`gripmoe attack`: all attacks on a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gripmoe.attacks import harmless, relearning
from gripmoe.attacks.base import NewsSetting, QuestionSetting, by_item
from gripmoe.attacks.run import Attack, attacks_on, run_attacks, stored
from gripmoe.cli import options
from gripmoe.cli.common import run_and_benchmark
from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.provenance import entry_of, provenance_of, recorded
from gripmoe.config.reading import parse_settings
from gripmoe.config.training import Relearning
from gripmoe.io.files import file_digest, read_json, write_csv, write_json
from gripmoe.io.locks import exclusive
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model


def attack(
    *,
    settings: options.Settings,
    run_file: options.RunFile,
    benchmark_settings: options.BenchmarkSettings,
    model_file: options.ModelFile,
    checkpoint_file: options.CheckpointFile,
    data: options.DataFolder,
    questions: options.ItemsFile,
    output: options.OutputFile,
) -> None:
    """Attack a run.

    Results stay in attack_state.json beside --output. A repeated or interrupted command makes only attacks that are
    missing there, or whose code, settings, data or models have changed.

    \b
    Example:
      gripmoe attack --settings '{"learning_rate": 0.001}' \\
          --benchmark '{"data": {"source": "embedded"}, "target": {"forget_accuracy": 0.27},
          "retain_documents": 200, "max_length": 256, "evaluation_batch_size": 128}' \\
          --run run/run.yaml --model model/model.json --checkpoint run/checkpoint.json --data data \\
          --questions run/attack_questions.csv --output run/attack.json
    """
    run, benchmark = run_and_benchmark(run_file, benchmark_settings)
    finetuning = parse_settings(Relearning | None, settings)
    state_file, attacks = output.with_name("attack_state.json"), attacks_on(benchmark)
    with exclusive(output.parent):
        weights = [read_json(path)["weights"] for path in (model_file, checkpoint_file)]
        identities = _identities(attacks, benchmark, data, finetuning, models=weights, seed=run.seed)
        known = stored(state_file, identities)
        with recorded(provenance_of(output), attack, resumed=bool(known)):
            setting = None
            if len(known) < len(attacks):
                before = MoEModel(load_model(model_file.parent / "weights", device="cpu")[0])
                model, tokenizer = load_model(checkpoint_file.parent / "weights")
                given = (before, MoEModel(model), tokenizer, data, benchmark, run.seed, finetuning)
                setting = (NewsSetting if benchmark.is_news else QuestionSetting)(*given)
            description = f"attacks on {run.objective}/{run.method_name}/{run.seed}"
            found = run_attacks(attacks, setting, state_file, identities, description)
            write_csv(questions, by_item(found))
            write_json(output, found.metrics)


def _identities(
    attacks: Mapping[str, Attack], benchmark: Benchmark, data: Path, finetuning: Relearning | None, **others: Any
) -> dict[str, dict[str, Any]]:
    """What the result of each attack depends on."""
    files = (*sorted(data.glob("*.jsonl")), *map(Path, benchmark.rewrites.values()))
    of_all = {
        **others,
        "benchmark": benchmark.model_dump(
            mode="json", exclude={"attacks", "evaluation_batch_size", "few_shot_questions", "metrics"}
        ),
        "files": [[file.name, file_digest(file)] for file in files],
    }
    finetunes = {"relearning": finetuning and finetuning.model_dump(mode="json")}
    return {
        name: {**of_all, "code": code, **(finetunes if _relearns(attacks[name]) else {})}
        for name, code in codes_of(attacks, benchmark.attacks).items()
    }


def _relearns(attack: Attack) -> bool:
    """Whether an attack may read the settings of relearning: those of its module, `harmless`, which repeats them, and
    one's own."""
    return attack.__module__ in (relearning.__name__, harmless.__name__) or not _of_package(attack.__module__)


def _of_package(module: str) -> bool:
    return module.partition(".")[0] == "gripmoe"


def codes_of(attacks: Mapping[str, Attack], own: Mapping[str, str]) -> dict[str, str | list[str]]:
    """Digests of what each attack runs: of the package its code and that of every setting; of one's `own`, which a
    benchmark names by its path, the path, its file, and all attacks of the package, which it may call. `harmless`
    repeats the others, so it has their digests too."""
    codes: dict[str, str | list[str]] = {}
    for name, each in attacks.items():
        path = own.get(name) or entry_of(each)
        module = path.partition(":")[0]
        if _of_package(module):
            codes[name] = code_fingerprint("gripmoe.attacks.base", "gripmoe.moe.storage:load_model", path)
        else:
            file = Path(sys.modules[module].__file__)
            codes[name] = f"{path} {file_digest(file)} {code_fingerprint('gripmoe.cli.attack:attack')}"
    return {name: list(codes.values()) if attacks[name] is harmless.attack else code for name, code in codes.items()}
