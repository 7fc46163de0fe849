"""`gripmoe realign`: Method B, or the original router put back, on a finished run."""

from __future__ import annotations

from gripmoe.cli.common import beside
from gripmoe.config.provenance import recorded
from gripmoe.config.world import load_run
from gripmoe.constraints.realignment import holdout_report, kaczmarz_report, make_correction
from gripmoe.data.corpora import load_corpus
from gripmoe.data.documents import collate
from gripmoe.io.clock import now
from gripmoe.io.files import file_digest, read_json, write_json
from gripmoe.io.locks import exclusive
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model, load_routers, save_model
from gripmoe.moe.traces import StoredTrace


def realign(args) -> None:
    """Corrects the routers of a finished run: Method B, or the original router put back. Of the original model only the
    routers are read; what it saw was recorded."""
    run = load_run(args.run)
    folder = args.output.parent
    with exclusive(folder), recorded(beside(args.output), realign):
        model, tokenizer = load_model(args.checkpoint.parent / "weights")
        moe = MoEModel(model)
        theta_0 = load_routers(args.model.parent / "weights", moe)
        whose = {"model": read_json(args.model)["weights"], "corpus": file_digest(args.retain_corpus)}
        trace = StoredTrace(args.trace, whose)
        benchmark = run.benchmark
        rows = load_corpus(args.retain_corpus, tokenizer, limit=benchmark.retain_documents, **benchmark.reading)
        batch = collate(rows, tokenizer.pad_token_id).to(model.device)
        report = {}
        if run.method.correction == "realign":
            report |= kaczmarz_report(moe, theta_0, trace)
        if run.method.form == "paper":
            report |= holdout_report(moe, theta_0, trace, batch)
        started = now()
        report |= make_correction(run.method, theta_0, trace, batch)(moe)
        seconds = now() - started
        digest = save_model(model, tokenizer, folder / "weights")
        corrected = read_json(args.checkpoint)
        outcome = {"status": corrected["status"], "steps": corrected["steps"], "correction_seconds": seconds}
        if "seconds_per_step" in corrected:  # what the correction adds to the whole run
            trained = corrected["seconds_per_step"] * corrected["steps"]
            outcome |= {"time_ratio": (trained + seconds) / trained}
            outcome |= {name: corrected[name] for name in ("seconds_per_step", "plain_seconds_per_step")}
        write_json(args.output, {"weights": digest, **outcome, **report})
