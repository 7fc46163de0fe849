"""`gripmoe edit-weights`: the checkpoint of a method that changes weights and trains nothing."""

from __future__ import annotations

from gripmoe.cli import options
from gripmoe.config.provenance import provenance_of, recorded
from gripmoe.config.world import load_run
from gripmoe.data.corpora import load_corpus
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_json
from gripmoe.io.locks import exclusive
from gripmoe.moe.storage import load_model, save_model
from gripmoe.training import gradient_routing, word_erasure


def edit_weights(
    *,
    run_file: options.RunFile,
    model_file: options.ModelFile,
    data: options.DataFolder,
    output: options.OutputFile,
) -> None:
    """Erase words, or remove experts, without training.

    `erase_words` makes the embeddings of the words of the forget documents random, as a control.
    `remove_experts` removes the experts that alone learned forget documents.

    \b
    Example:
      gripmoe edit-weights --run run/run.yaml --model model/model.json --data data --output run/checkpoint.json
    """
    run = load_run(run_file)
    with exclusive(output.parent), recorded(provenance_of(output), edit_weights):
        model, tokenizer = load_model(model_file.parent / "weights", device="cpu")
        if run.method.baseline == "erase_words":
            reading = run.benchmark.reading
            rows = [load_corpus(data / f"{side}_corpus.jsonl", tokenizer, **reading) for side in ("forget", "retain")]
            word_erasure.erase_words(model, *rows, word_erasure.fresh_embeddings(model).to(model.dtype))
            edit = {"words": word_erasure.ERASED_WORDS}
        elif run.method.baseline == "remove_experts":
            if not (count := read_json(model_file).get("forget_experts")):
                raise ConfigError(
                    f"{model_file}: no experts of {run.model!r} learned forget documents alone; give its row in "
                    f"models.yaml `forget_experts`"
                )
            gradient_routing.remove_experts(model, count)
            edit = {"experts": count}
        else:
            raise ConfigError(f"{run_file}: {run.method_name!r} is no method that changes weights without training")
        digest = save_model(model, tokenizer, output.parent / "weights")
        write_json(output, {"weights": digest, "status": "edited", **edit})
