"""`gripmoe attack`: all attacks on a run."""

from __future__ import annotations

import sys
from pathlib import Path

from gripmoe.attacks.base import NewsSetting, QuestionSetting, by_item
from gripmoe.attacks.run import attacks_on, run_attacks
from gripmoe.cli import options
from gripmoe.cli.common import identity_of, run_and_benchmark
from gripmoe.config.provenance import provenance_of, recorded
from gripmoe.config.reading import parse_settings
from gripmoe.config.training import Relearning
from gripmoe.io.files import read_json, write_csv, write_json
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

    An interrupted command continues with the next attack.

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
    state_file = output.with_name("attack_state.json")
    with exclusive(output.parent), recorded(provenance_of(output), attack, state_file.name):
        before = MoEModel(load_model(model_file.parent / "weights", device="cpu")[0])
        model, tokenizer = load_model(checkpoint_file.parent / "weights")
        after = MoEModel(model)
        given = (before, after, tokenizer, data, benchmark, run.seed, finetuning)
        setting = (NewsSetting if benchmark.is_news else QuestionSetting)(*given)
        attacks = attacks_on(benchmark)
        rewrites = map(Path, benchmark.rewrites.values())
        own = [Path(sys.modules[attacks[name].__module__].__file__) for name in benchmark.attacks]
        files = (run_file, *sorted(data.glob("*.jsonl")), *rewrites, *own)
        weights = [read_json(path)["weights"] for path in (model_file, checkpoint_file)]
        identity = identity_of(attack, *files, models=weights, relearning=settings, benchmark=benchmark_settings)
        description = f"attacks on {run.objective}/{run.method_name}/{run.seed}"
        found = run_attacks(attacks, setting, state_file, identity, description)
        write_csv(questions, by_item(found))
        write_json(output, found.metrics)
        state_file.unlink(missing_ok=True)
