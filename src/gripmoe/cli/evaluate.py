"""`gripmoe evaluate`: all metrics of a run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gripmoe.cli import options
from gripmoe.cli.common import beside, measured
from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.provenance import recorded
from gripmoe.data.corpora import in_batches, load_corpus
from gripmoe.evaluation.general import general_utility, solved_questions
from gripmoe.evaluation.metrics import choice_metrics, own_metrics, question_results
from gripmoe.evaluation.muse import News, leakage, mean_score, news_scores, privacy_leakage
from gripmoe.evaluation.questions import harness_answers, load_questions
from gripmoe.evaluation.routing_stability import reload_stability, stability_metrics
from gripmoe.io.files import read_json, read_jsonl, write_csv, write_json
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
    _, benchmark = measured(run_file, benchmark_settings)
    with exclusive(output.parent), recorded(beside(output), evaluate):
        after, tokenizer = load_model(checkpoint_file.parent / "weights")
        if benchmark.is_news:
            metrics, items = _news(benchmark, after, tokenizer, data, retrained_file)
        else:
            metrics, items = _letters(benchmark, after, tokenizer, data)
        metrics |= own_metrics(benchmark, after, tokenizer, data)
        if is_moe(after):
            before, _ = load_model(model_file.parent / "weights")  # not beside it while long prompts fill the memory
            reading = benchmark.reading
            held_out = load_corpus(data / "held_out_corpus.jsonl", tokenizer, **reading)
            forget = load_corpus(data / "forget_corpus.jsonl", tokenizer, limit=len(held_out), **reading)
            models = MoEModel(before), MoEModel(after)
            for rows, prefix in ((held_out, "routing_stability"), (forget, "forget_routing_stability")):
                metrics |= stability_metrics(*models, in_batches(rows, tokenizer.pad_token_id), prefix)
            metrics |= reload_stability(models[1], in_batches(held_out, tokenizer.pad_token_id))
        else:
            metrics["num_experts"] = 0  # tables say why nothing of a router stands there
        write_csv(questions, items)
        write_json(output, metrics)


def _letters(benchmark: Benchmark, model, tokenizer, data: Path) -> tuple[dict[str, float], list[dict]]:
    forget, retain = (load_questions(data / f"{name}_questions.jsonl", "test") for name in ("forget", "retain"))
    questions = [*forget, *retain]
    with tempfile.TemporaryDirectory() as work:
        harness = dict(work_folder=Path(work), batch_size=benchmark.evaluation_batch_size)
        answers = harness_answers(model, tokenizer, questions, **harness)
        utility = general_utility(
            model,
            tokenizer,
            retain,
            solved_questions(data / "retain_questions.jsonl"),
            read_jsonl(data / "truthfulqa.jsonl"),
            few_shot_questions=benchmark.few_shot_questions,
            **harness,
        )
    return choice_metrics(questions, answers) | utility, question_results(questions, answers)


def _news(
    benchmark: Benchmark, model, tokenizer, data: Path, retrained_file: Path
) -> tuple[dict[str, float], list[dict]]:
    news = News.load(data)
    scores = news_scores(model, tokenizer, news, "test", strip_prompts=benchmark.strip_prompts)
    metrics = {name: mean_score(items) for name, items in scores.items()}
    metrics |= {f"num_{name}": len(items) for name, items in scores.items()}
    metrics |= leakage(model, tokenizer, news.privleak)
    retrained = read_json(retrained_file)
    metrics["retrained_auc_min_40"] = retrained["auc_min_40"]
    metrics["privleak"] = privacy_leakage(metrics["auc_min_40"], retrained["auc_min_40"])
    return metrics, [{"criterion": name, "id": i.id, "score": i.score} for name in scores for i in scores[name]]
