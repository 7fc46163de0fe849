"""One subcommand per rule of the workflow: read files, call one function of the package, write files.

Flags are paths; `--settings` is the part of the validated configuration, as JSON, that the step depends on. Heavy
imports stand in the commands that use them. Every command can be pasted from a log and run by hand.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gripmoe.config import Benchmark, ConfigError, Data, Method, ModelConfig, Run, load_run, parse_settings
from gripmoe.files import file_digest, read_json, write_json, write_yaml
from gripmoe.provenance import recorded


def configure(args) -> None:
    """Writes the completely resolved configuration of one cell."""
    write_yaml(args.output, parse_settings(Run, args.settings).model_dump(mode="json"))


def prepare_data(args) -> None:
    """Writes a benchmark's questions and corpora as JSON lines."""
    from gripmoe.files import write_jsonl

    data = parse_settings(Data, args.settings)
    with recorded(args.output / "provenance.json", "gripmoe.worlds.documents", "gripmoe.data.published"):
        if data.source == "embedded":
            from gripmoe.worlds.documents import make_world, wmdp_files

            files = wmdp_files(make_world(data.world_seed), data.world_seed)
        else:
            from gripmoe.data.published import benchmark_files

            files = benchmark_files(data)
        for name, rows in files.items():
            write_jsonl(args.output / f"{name}.jsonl", rows)


def prepare_model(args) -> None:
    """Trains an embedded base model or fetches a published one; checks that it answers the questions it should."""
    from gripmoe.moe.storage import save_model

    config = parse_settings(ModelConfig, args.settings)
    folder = args.output.parent
    with recorded(folder / "provenance.json", "gripmoe.finetune", "gripmoe.moe.storage"):
        if config.source == "published":
            from gripmoe.moe.storage import load_published

            digest = save_model(*load_published(config), folder / "weights")
            write_json(args.output, {"weights": digest, "id": config.id, "revision": config.revision or "main"})
            return
        from gripmoe.finetune import train_base
        from gripmoe.worlds.documents import all_texts, make_world
        from gripmoe.worlds.models import make_model
        from gripmoe.worlds.tokenizer import make_tokenizer

        _one_thread_unless_set()
        world = make_world(config.world_seed)
        tokenizer = make_tokenizer(all_texts(world))
        model = make_model(config.family, len(tokenizer), seed=config.seed, **config.size)
        losses = train_base(
            model,
            tokenizer,
            world if config.trained_on == "everything" else world.without_forget(),
            max_letter_steps=config.max_letter_steps,
            late_steps=config.late_steps,
            learning_rate=config.learning_rate,
            seed=config.seed,
            state_file=folder / "state.pt",
        )
        digest = save_model(model, tokenizer, folder / "weights")
        write_json(args.output, {"weights": digest, "final_loss": losses[-1], **_base_scores(model, tokenizer, config)})
        (folder / "state.pt").unlink(missing_ok=True)


def _base_scores(model, tokenizer, config) -> dict[str, float]:
    """Accuracy per domain before unlearning. Raises ValueError where it is too low on what the model was trained on."""
    from gripmoe.evaluation.choice import accuracy, direct_answers
    from gripmoe.worlds.documents import make_world, wmdp_files

    files = wmdp_files(make_world(config.world_seed), config.world_seed)
    scores = {
        domain: accuracy(direct_answers(model, tokenizer, files[f"{domain}_questions"]))
        for domain in ("forget", "retain")
    }
    trained = ("forget", "retain") if config.trained_on == "everything" else ("retain",)
    for domain in trained:
        if scores[domain] < config.required_accuracy:
            raise ValueError(
                f"the base model answers {scores[domain]:.3f} of the {domain} questions, below "
                f"{config.required_accuracy}: nothing measured on it would mean anything. Give it more steps or "
                "another `seed` in models.yaml."
            )
    return {f"{domain}_accuracy": score for domain, score in scores.items()}


def trace_routing(args) -> None:
    """Records what the original routers see and select on the retain documents."""
    from gripmoe.data.corpora import in_batches, load_corpus
    from gripmoe.moe import MoEModel
    from gripmoe.moe.storage import load_model, save_trace

    benchmark = parse_settings(Benchmark, args.settings)
    _one_thread_unless_set()
    with recorded(_beside(args.output), "gripmoe.moe.model"):
        model, tokenizer = load_model(args.model.parent / "weights")
        rows = load_corpus(args.retain_corpus, tokenizer, benchmark.max_length, benchmark.retain_documents)
        trace = MoEModel(model).trace(in_batches(rows, tokenizer.pad_token_id))
        weights = {"model": read_json(args.model)["weights"]}
        save_trace(args.output, trace, weights)
        tokens = {f"tokens_layer_{layer}": len(routing) for layer, routing in trace.items()}
        write_json(args.digest, {**weights, "sha256": file_digest(args.output), "documents": len(rows), **tokens})


def fit_basis(args) -> None:
    """Fits the retain bases of one method to the recorded routing."""
    from gripmoe.constraints import fit_bases
    from gripmoe.geometry.nullspace import EpsNull
    from gripmoe.moe.storage import load_trace, save_bases

    method = parse_settings(Method, args.settings)
    _one_thread_unless_set()
    with recorded(_beside(args.output), "gripmoe.constraints"):
        weights = {"model": read_json(args.model)["weights"]}
        trace = load_trace(args.trace, weights)
        num_experts = next(iter(trace.values())).scores_NE.shape[1]
        eps_null = EpsNull(method.eps_null.value, method.eps_null.kind)
        bases = fit_bases(trace, num_experts, eps_null, method.granularity)
        save_bases(args.output, bases, weights)
        ranks = {f"mean_rank_layer_{layer}": basis.ranks.double().mean().item() for layer, basis in bases.items()}
        write_json(args.digest, {**weights, "sha256": file_digest(args.output), **ranks})


def unlearn(args) -> None:
    """Trains one cell until it has forgotten, or as far as it gets."""
    from gripmoe.constraints import make_constraint
    from gripmoe.correction import make_correction
    from gripmoe.data.corpora import load_corpus
    from gripmoe.data.documents import collate
    from gripmoe.evaluation.choice import accuracy, direct_answers, load_questions
    from gripmoe.moe import MoEModel
    from gripmoe.moe.storage import load_bases, load_model, load_trace, save_model
    from gripmoe.objectives import make_objective
    from gripmoe.unlearning import unlearn as run_unlearning

    run = load_run(args.run)
    folder = args.output.parent
    _one_thread_unless_set()
    with recorded(_beside(args.output), "gripmoe.unlearning", "gripmoe.correction"):
        model, tokenizer = load_model(args.model.parent / "weights")
        weights = {"model": read_json(args.model)["weights"]}
        moe = MoEModel(model)
        theta_0 = moe.thetas()
        corpus = {
            name: load_corpus(args.data / f"{name}_corpus.jsonl", tokenizer, run.benchmark.max_length)
            for name in ("forget", "retain")
        }
        trace = load_trace(args.trace, weights, model.device)
        recorded_rows = corpus["retain"][: run.benchmark.retain_documents]
        batch = collate(recorded_rows, tokenizer.pad_token_id).to(model.device)
        dev = load_questions(args.data / "forget_questions.jsonl", "dev")

        outcome = run_unlearning(
            moe,
            make_objective(run.objective, run.training.objective, moe, batch, run.seed),
            make_constraint(
                run.method, trace, load_bases(args.bases, weights, model.device) if args.bases else None, run.seed
            ),
            corpus["forget"],
            corpus["retain"],
            run.training,
            seed=run.seed,
            pad_id=tokenizer.pad_token_id,
            target=run.benchmark.target.forget_accuracy,
            forget_accuracy=lambda m: accuracy(direct_answers(m.model, tokenizer, dev)),
            corrected=make_correction(run.method, theta_0, trace, batch) if run.method.correction else None,
            state_file=folder / "state.pt",
            description=f"{run.objective}/{run.method_name}/{run.seed}",
        )
        digest = save_model(model, tokenizer, folder / "weights")
        write_json(folder / "history.json", outcome.history)
        write_json(args.output, {"weights": digest, "status": outcome.status, "steps": outcome.steps})
        (folder / "state.pt").unlink(missing_ok=True)


def realign(args) -> None:
    """Corrects the routers of a finished run: Method B, or the original router put back."""
    from gripmoe.correction import make_correction
    from gripmoe.data.corpora import load_corpus
    from gripmoe.data.documents import collate
    from gripmoe.moe import MoEModel
    from gripmoe.moe.storage import load_model, load_trace, save_model

    run = load_run(args.run)
    folder = args.output.parent
    _one_thread_unless_set()
    with recorded(_beside(args.output), "gripmoe.correction"):
        original, tokenizer = load_model(args.model.parent / "weights")
        theta_0 = MoEModel(original).thetas()
        model, _ = load_model(args.checkpoint.parent / "weights")
        moe = MoEModel(model)
        trace = load_trace(args.trace, {"model": read_json(args.model)["weights"]}, model.device)
        benchmark = run.benchmark
        rows = load_corpus(args.retain_corpus, tokenizer, benchmark.max_length, benchmark.retain_documents)
        batch = collate(rows, tokenizer.pad_token_id).to(model.device)
        report = make_correction(run.method, theta_0, trace, batch)(moe)
        digest = save_model(model, tokenizer, folder / "weights")
        corrected = read_json(args.checkpoint)
        outcome = {"status": corrected["status"], "steps": corrected["steps"]}
        write_json(args.output, {"weights": digest, **outcome, **report})


def evaluate(args) -> None:
    """All metrics of one cell in one process: letter questions through the harness, routing on held-out tokens."""
    import tempfile

    from gripmoe.data.corpora import in_batches, load_corpus
    from gripmoe.evaluation.choice import harness_answers, load_questions
    from gripmoe.evaluation.report import choice_metrics, question_results
    from gripmoe.evaluation.routing import stability_metrics
    from gripmoe.files import write_csv
    from gripmoe.moe import MoEModel
    from gripmoe.moe.storage import load_model

    run = load_run(args.run)
    _one_thread_unless_set()
    with recorded(_beside(args.output), "gripmoe.evaluation.report", "gripmoe.evaluation.routing"):
        before, _ = load_model(args.model.parent / "weights")
        after, tokenizer = load_model(args.checkpoint.parent / "weights")
        questions = [
            question
            for name in ("forget", "retain")
            for question in load_questions(args.data / f"{name}_questions.jsonl", "test")
        ]
        with tempfile.TemporaryDirectory() as work:
            answers = harness_answers(
                after, tokenizer, questions, work_folder=Path(work), batch_size=run.benchmark.evaluation_batch_size
            )
        metrics = choice_metrics(questions, answers)
        if hasattr(after.config, "num_experts"):
            held_out = load_corpus(args.data / "held_out_corpus.jsonl", tokenizer, run.benchmark.max_length)
            forget = load_corpus(args.data / "forget_corpus.jsonl", tokenizer, run.benchmark.max_length, len(held_out))
            models = MoEModel(before), MoEModel(after)
            for rows, prefix in ((held_out, "routing_stability"), (forget, "forget_routing_stability")):
                metrics |= stability_metrics(*models, in_batches(rows, tokenizer.pad_token_id), prefix)
        write_csv(args.questions, question_results(questions, answers))
        write_json(args.output, metrics)


def attack(args) -> None:
    """All attacks on one cell in one process."""
    import tempfile

    from gripmoe.attacks.forcing import expert_forcing
    from gripmoe.evaluation.choice import direct_answers, harness_answers, load_questions
    from gripmoe.evaluation.report import load_answers
    from gripmoe.files import write_csv
    from gripmoe.moe import MoEModel
    from gripmoe.moe.storage import load_model

    run = load_run(args.run)
    _one_thread_unless_set()
    with recorded(_beside(args.output), "gripmoe.attacks.forcing"), tempfile.TemporaryDirectory() as work:
        before, _ = load_model(args.model.parent / "weights")
        after, tokenizer = load_model(args.checkpoint.parent / "weights")

        forget = load_questions(args.data / "forget_questions.jsonl", "test")

        def answer_all(moe, questions):
            return harness_answers(
                moe.model, tokenizer, questions, work_folder=Path(work), batch_size=run.benchmark.evaluation_batch_size
            )

        result = expert_forcing(
            MoEModel(before),
            MoEModel(after),
            tokenizer,
            forget,
            load_questions(args.data / "retain_questions.jsonl", "dev"),
            load_answers(args.answers, forget),
            answer_all,
            lambda moe, questions: direct_answers(moe.model, tokenizer, questions),
            seed=run.seed,
        )
        write_csv(args.questions, result.questions)
        write_json(args.output, result.metrics)


def collect(args) -> None:
    """One tidy CSV of all cells: a row per (model, benchmark, objective, method, seed, metric)."""
    from gripmoe.reporting.collect import collect_cells

    with recorded(_beside(args.output), "gripmoe.reporting.collect"):
        collect_cells(args.cells, args.output)


def _one_thread_unless_set() -> None:
    """Two jobs side by side are faster than one job on two threads, for models this small."""
    import torch

    if not torch.cuda.is_available() and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)


def _beside(output: Path) -> Path:
    return output.with_name(f"{output.stem}.provenance.json")


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code: 2, with one line on stderr, for a mistake in its input."""
    parser = argparse.ArgumentParser(prog="gripmoe", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(function, *flags: str, optional: tuple[str, ...] = ()):
        sub = commands.add_parser(function.__name__.replace("_", "-"), help=function.__doc__.splitlines()[0])
        sub.set_defaults(function=function)
        for flag in (*flags, *optional):
            sub.add_argument(f"--{flag}", type=str if flag == "settings" else Path, required=flag not in optional)
        return sub

    command(configure, "settings", "output")
    command(prepare_data, "settings", "output")
    command(prepare_model, "settings", "output")
    command(trace_routing, "settings", "model", "retain-corpus", "digest", "output")
    command(fit_basis, "settings", "model", "trace", "digest", "output")
    command(unlearn, "run", "model", "data", "trace", "output", optional=("bases",))
    command(realign, "run", "model", "checkpoint", "retain-corpus", "trace", "output")
    command(evaluate, "run", "model", "checkpoint", "data", "questions", "output")
    command(attack, "run", "model", "checkpoint", "data", "answers", "questions", "output")
    command(collect, "output").add_argument("cells", nargs="+", type=Path)

    args = parser.parse_args(argv)
    try:
        args.function(args)
    except (ConfigError, ValueError, FileNotFoundError) as error:
        if os.environ.get("GRIPMOE_DEBUG"):
            raise
        print(f"gripmoe {args.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
