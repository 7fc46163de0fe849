"""`gripmoe realign`: Method B, the original router put back, or UNDO, on a finished run."""

from __future__ import annotations

from gripmoe.cli import options
from gripmoe.config.provenance import provenance_of, recorded
from gripmoe.config.world import load_run
from gripmoe.constraints.realignment import holdout_report, kaczmarz_report, make_correction
from gripmoe.data.corpora import load_corpus
from gripmoe.data.documents import collate
from gripmoe.io.clock import now
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest, read_json, write_json
from gripmoe.io.locks import exclusive
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model, load_routers, save_model
from gripmoe.moe.traces import StoredTrace
from gripmoe.training.undo import undo


def realign(
    *,
    run_file: options.RunFile,
    model_file: options.ModelFile,
    checkpoint_file: options.CheckpointFile,
    retain_corpus: options.RetainCorpus,
    trace_file: options.TraceFile,
    output: options.OutputFile,
) -> None:
    """Correct a finished run: Method B, the original routers, or UNDO.

    The command reads only the routers of the original model, and their inputs from the trace.
    For the method restore_router, the command puts the original router weights back instead. For undo, the command
    distils the model into a copy with noise in its experts.

    \b
    Example:
      gripmoe realign --run ptc/run.yaml --model model/model.json --checkpoint unconstrained/checkpoint.json \\
          --retain-corpus data/retain_corpus.jsonl --trace routing.safetensors --output ptc/checkpoint.json
    """
    run, corrected = load_run(run_file), read_json(checkpoint_file)
    if run.method.rule != "realign":
        raise ConfigError(
            f"{run_file}: {run.method_name!r} corrects no finished run; give the run.yaml of a correction"
        )
    if missing := {"status", "steps"} - (corrected.keys() if isinstance(corrected, dict) else set()):
        raise ConfigError(
            f"{checkpoint_file}: lacks {', '.join(sorted(missing))}; give the checkpoint.json of `gripmoe unlearn`"
        )
    folder = output.parent
    with exclusive(folder), recorded(provenance_of(output), realign):
        model, tokenizer = load_model(checkpoint_file.parent / "weights")
        moe = MoEModel(model)
        theta_0, biases = load_routers(model_file.parent / "weights", moe)
        whose = {"model": read_json(model_file)["weights"], "corpus": file_digest(retain_corpus)}
        trace = StoredTrace(trace_file, whose)
        benchmark = run.benchmark
        rows = load_corpus(retain_corpus, tokenizer, limit=benchmark.retain_documents, **benchmark.reading)
        batch = collate(rows, tokenizer.pad_token_id).to(model.device)
        report = {}
        if run.method.correction == "realign":
            report |= kaczmarz_report(moe, theta_0, trace)
        if run.method.form == "paper":  # the report has both forms, so one method of each unlearned run makes it
            report |= holdout_report(moe, theta_0, trace, batch)
        started = now()
        if run.method.correction == "undo":
            every = load_corpus(retain_corpus, tokenizer, **benchmark.reading)
            report |= undo(moe, every, run.method.undo, pad_id=tokenizer.pad_token_id, seed=run.seed)
        else:
            report |= make_correction(run.method, theta_0, biases, trace, batch)(moe)
        seconds = now() - started
        digest = save_model(model, tokenizer, folder / "weights")
        outcome = {"status": corrected["status"], "steps": corrected["steps"], "correction_seconds": seconds}
        if "tokens" in corrected:
            report["tokens"] = corrected["tokens"] + report.get("tokens", 0)
        if corrected["steps"] and "seconds_per_step" in corrected:  # the correction adds to the time of the run
            trained = corrected["seconds_per_step"] * corrected["steps"]
            outcome |= {"time_ratio": (trained + seconds) / trained}
            outcome |= {name: corrected[name] for name in ("seconds_per_step", "plain_seconds_per_step")}
        write_json(output, {"weights": digest, **outcome, **report})
