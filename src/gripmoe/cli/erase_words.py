"""`gripmoe erase-words`: a control that erases words instead of facts."""

from __future__ import annotations

from gripmoe.cli import options
from gripmoe.cli.common import provenance_of
from gripmoe.config.provenance import recorded
from gripmoe.config.world import load_run
from gripmoe.data.corpora import load_corpus
from gripmoe.io.files import write_json
from gripmoe.io.locks import exclusive
from gripmoe.moe.storage import load_model, save_model
from gripmoe.training import word_erasure


def erase_words(
    *,
    run_file: options.RunFile,
    model_file: options.ModelFile,
    data: options.DataFolder,
    output: options.OutputFile,
) -> None:
    """Replace the embeddings of the words of the forget documents, as a control.

    The new embeddings are random.

    \b
    Example:
      gripmoe erase-words --run run/run.yaml --model model/model.json --data data --output run/checkpoint.json
    """
    reading = load_run(run_file).benchmark.reading
    with exclusive(output.parent), recorded(provenance_of(output), erase_words):
        model, tokenizer = load_model(model_file.parent / "weights", device="cpu")
        rows = [load_corpus(data / f"{side}_corpus.jsonl", tokenizer, **reading) for side in ("forget", "retain")]
        word_erasure.erase_words(model, *rows, word_erasure.fresh_embeddings(model).to(model.dtype))
        digest = save_model(model, tokenizer, output.parent / "weights")
        write_json(output, {"weights": digest, "status": "erased", "words": word_erasure.ERASED_WORDS})
