"""`gripmoe trace-routing`: record inputs, scores and selections of the original routers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from gripmoe.cli import options
from gripmoe.config.benchmarks import Documents
from gripmoe.config.provenance import provenance_of, recorded
from gripmoe.config.reading import parse_settings
from gripmoe.data.corpora import in_batches, load_corpus
from gripmoe.io.files import file_digest, read_json, remove_halves, write_json
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.moe.traces import record_trace


def trace_routing(
    *,
    settings: options.Settings,
    model_file: options.ModelFile,
    retain_corpus: options.RetainCorpus,
    forget_corpus: options.ForgetCorpus,
    digest: options.DigestFile,
    output: options.OutputFile,
    forget_output: Annotated[
        Path, options.written_file("--forget-output", "The file to write of the forget documents.")
    ],
) -> None:
    """Record inputs, scores and selections of the original routers on retain and forget documents.

    \b
    Example:
      gripmoe trace-routing --settings '{"data": {"source": "embedded"}, "retain_documents": 200,
          "max_length": 256}' --model model/model.json \\
          --retain-corpus data/retain_corpus.jsonl --forget-corpus data/forget_corpus.jsonl \\
          --digest routing.json --output routing.safetensors --forget-output routing_forget.safetensors
    """
    documents = parse_settings(Documents, settings)
    with recorded(provenance_of(output), trace_routing):
        model, tokenizer = load_model(model_file.parent / "weights")
        moe = MoEModel(model)
        weights = {"model": read_json(model_file)["weights"]}
        contents = dict(weights)
        corpora = ("retain", retain_corpus, output), ("forget", forget_corpus, forget_output)
        for name, corpus, trace in corpora:
            remove_halves(trace.parent, trace.name)
            rows = load_corpus(corpus, tokenizer, limit=documents.retain_documents, **documents.reading)
            metadata = {**weights, "corpus": file_digest(corpus)}
            tokens = record_trace(trace, moe, in_batches(rows, tokenizer.pad_token_id), metadata)
            contents |= {f"{name}_sha256": file_digest(trace), f"{name}_documents": len(rows)}
            contents[f"{name}_tokens"] = tokens
        write_json(digest, contents)
