"""`gripmoe attack`: all attacks on a run."""

from __future__ import annotations

from gripmoe.attacks.base import NewsSetting, QuestionSetting, by_item
from gripmoe.attacks.identity import identities_of
from gripmoe.attacks.run import attacks_on, run_attacks, stored
from gripmoe.cli import options
from gripmoe.cli.common import run_and_benchmark
from gripmoe.config.provenance import provenance_of, recorded
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
        files = {file.stem: file_digest(file) for file in sorted(data.glob("*.jsonl"))}
        identities = identities_of(attacks, benchmark, files, finetuning, models=weights, seed=run.seed)
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
