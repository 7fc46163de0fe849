"""What the original routers see and select, and the bases of Method A."""

from __future__ import annotations

from gripmoe.catalogue import Task
from gripmoe.commands import beside
from gripmoe.config import Method
from gripmoe.data.corpora import in_batches, load_corpus
from gripmoe.files import file_digest, read_json, remove_halves, write_json
from gripmoe.method_a import fit_bases, held_trace
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model, save_bases
from gripmoe.moe.traces import StoredTrace, load_rules, record_trace
from gripmoe.parsing import parse_settings
from gripmoe.provenance import recorded


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


def fit_basis(args) -> None:
    """Fits the bases of one method to the recorded routing."""
    method = parse_settings(Method, args.settings)
    with recorded(beside(args.output), fit_basis):
        weights = {"model": read_json(args.model)["weights"]}
        traces = StoredTrace(args.trace, weights), StoredTrace(args.forget_trace, weights)
        trace = held_trace(method, *traces)
        remove_halves(args.output.parent, args.output.name)
        bases = fit_bases(trace, load_rules(args.trace), method)
        save_bases(args.output, bases, weights)
        ranks = {layer: basis.ranks.double() for layer, basis in bases.items()}
        statistics = {f"mean_rank_layer_{layer}": of_experts.mean().item() for layer, of_experts in ranks.items()}
        for layer, of_experts in ranks.items():
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                statistics[f"rank_{100 * share:.0f}_layer_{layer}"] = of_experts.quantile(share).item()
        size = {"basis_megabytes": args.output.stat().st_size / 1e6}
        write_json(args.digest, {**weights, "sha256": file_digest(args.output), **size, **statistics})
