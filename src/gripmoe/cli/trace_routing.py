"""`gripmoe trace-routing`: what the original routers see and select."""

from __future__ import annotations

from gripmoe.cli.common import beside
from gripmoe.config.benchmarks import Task
from gripmoe.config.provenance import recorded
from gripmoe.config.reading import parse_settings
from gripmoe.data.corpora import in_batches, load_corpus
from gripmoe.io.files import file_digest, read_json, remove_halves, write_json
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.moe.traces import record_trace


def trace_routing(args) -> None:
    """Records what the original routers see and select on the retain and on the forget documents."""
    task = parse_settings(Task, args.settings)
    with recorded(beside(args.output), trace_routing):
        model, tokenizer = load_model(args.model.parent / "weights")
        moe = MoEModel(model)
        weights = {"model": read_json(args.model)["weights"]}
        digest = dict(weights)
        corpora = ("retain", args.retain_corpus, args.output), ("forget", args.forget_corpus, args.forget_output)
        for name, corpus, output in corpora:
            remove_halves(output.parent, output.name)
            rows = load_corpus(corpus, tokenizer, limit=task.retain_documents, **task.reading)
            metadata = {**weights, "corpus": file_digest(corpus)}
            tokens = record_trace(output, moe, in_batches(rows, tokenizer.pad_token_id), metadata)
            digest |= {f"{name}_sha256": file_digest(output), f"{name}_documents": len(rows)}
            digest[f"{name}_tokens"] = tokens
        write_json(args.digest, digest)
