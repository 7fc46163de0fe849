"""`gripmoe import-checkpoint`: import a model that others unlearned as the checkpoint of a run."""

from __future__ import annotations

from typing import Annotated

import transformers
import typer

from gripmoe.auditing import models
from gripmoe.cli import options
from gripmoe.config.provenance import provenance_of, recorded
from gripmoe.io.files import write_json
from gripmoe.io.locks import exclusive
from gripmoe.moe.storage import save_model


def import_checkpoint(
    *,
    model_file: options.ModelFile,
    external: Annotated[str, typer.Option(help="Folder or hub id of the unlearned model, or a PEFT adapter.")],
    output: options.OutputFile,
) -> None:
    """Import a model that others have unlearned.

    The command refuses a model that differs from the original one in more than weights.

    \b
    Example:
      gripmoe import-checkpoint --model model/model.json --external saves/unlearn/graddiff \\
          --output run/checkpoint.json
    """
    folder = model_file.parent / "weights"
    with exclusive(output.parent), recorded(provenance_of(output), import_checkpoint):
        original = models.find(folder, "--model")
        found = models.find(external, "--external", original=original)
        models.compare(original, found)
        of_original = transformers.AutoTokenizer.from_pretrained(folder)
        model, tokenizer = models.load(found, "cpu", of_original)
        models.compare_tokenizers(of_original, tokenizer, "--model and --external")
        models.check_finite(model, "--external")
        digest = save_model(model, of_original, output.parent / "weights")
        write_json(output, {"weights": digest, "status": "external", "source": external})
