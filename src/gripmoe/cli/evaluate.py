"""`gripmoe evaluate`: all metrics of a run."""

from __future__ import annotations

from pathlib import Path

from gripmoe.cli import options
from gripmoe.cli.common import run_and_benchmark
from gripmoe.config.provenance import provenance_of, recorded
from gripmoe.evaluation.letters import letter_metrics
from gripmoe.evaluation.metrics import as_number, own_metrics, require_other_names
from gripmoe.evaluation.muse import News, leakage, mean_score, news_scores, privacy_leakage
from gripmoe.evaluation.routing_stability import routing_metrics
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_csv, write_json
from gripmoe.io.locks import exclusive
from gripmoe.moe import MoEModel
from gripmoe.moe.families import is_moe
from gripmoe.moe.storage import load_model


def evaluate(
    *,
    run_file: options.RunFile,
    benchmark_settings: options.BenchmarkSettings,
    model_file: options.ModelFile,
    checkpoint_file: options.CheckpointFile,
    data: options.DataFolder,
    questions: options.ItemsFile,
    output: options.OutputFile,
    retrained_file: options.RetrainedFile = None,
) -> None:
    """Measure a run.

    The metrics are letter questions through the harness or MUSE's criteria, and routing on held-out tokens.

    \b
    Example:
      gripmoe evaluate --benchmark '{"data": {"source": "embedded"}, "target": {"forget_accuracy": 0.27},
          "retain_documents": 200, "max_length": 256, "evaluation_batch_size": 128}' \\
          --run run/run.yaml --model model/model.json --checkpoint run/checkpoint.json --data data \\
          --questions run/questions.csv --output run/evaluation.json
    """
    run, benchmark = run_and_benchmark(run_file, benchmark_settings)
    retrained_auc = _auc_of(retrained_file) if benchmark.is_news else None
    own = own_metrics(benchmark)
    with exclusive(output.parent), recorded(provenance_of(output), evaluate):
        after, tokenizer = load_model(checkpoint_file.parent / "weights")
        if benchmark.is_news:
            metrics, items = _news(after, tokenizer, data, retrained_auc)
        else:
            metrics, items = letter_metrics(benchmark, after, tokenizer, data)
        require_other_names(own, metrics)
        if run.method.baseline and "tokens" in (card := read_json(checkpoint_file)):  # of its training
            metrics["tokens"] = card["tokens"]
        if is_moe(after):
            before, _ = load_model(model_file.parent / "weights")  # only now: long prompts need the memory before
            metrics |= routing_metrics(benchmark, MoEModel(before), MoEModel(after), tokenizer, data)
        else:
            metrics["num_experts"] = 0  # tables then say why router metrics are missing
        require_other_names(own, metrics)
        found = {name: as_number(f"metrics.{name}", metric(after, tokenizer, data)) for name, metric in own.items()}
        write_csv(questions, items)
        write_json(output, metrics | found)


def _auc_of(retrained_file: Path | None) -> float:
    known = read_json(retrained_file) if retrained_file else {}
    if "auc_min_40" not in known:
        raise ConfigError(
            f"{retrained_file or '--retrained'}: auc_min_40 of the retrained model is needed, with which the leakage "
            "of news is compared; name one that was finetuned on the benchmark's documents to retain"
        )
    return known["auc_min_40"]


def _news(model, tokenizer, data: Path, retrained_auc: float) -> tuple[dict[str, float], list[dict]]:
    news = News.load(data)
    scores = news_scores(model, tokenizer, news, "test")
    metrics = {name: mean_score(items) for name, items in scores.items()}
    metrics |= leakage(model, tokenizer, news.privleak)
    metrics["privleak"] = privacy_leakage(metrics["auc_min_40"], retrained_auc)
    return metrics, [{"criterion": n, "id": i, "score": score} for n in scores for i, score in scores[n].items()]
