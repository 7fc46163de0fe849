"""Trains the base models of the package again, from nothing, and compares their scores with those in the package.

    python workflow/make_base.py --results results/base [--write]

Floating-point sums differ between kinds of CPU, so the weights may differ and the scores change a little. `--write`
replaces the models of the package, in bf16, by the trained ones. A finished training of the same settings and code is
not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd
import torch
from shared import CONFIG, command

from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.models import EmbeddedModel
from gripmoe.config.project import Project
from gripmoe.io.files import atomic_path, read_json, write_json
from gripmoe.moe.storage import load_model, weights_digest
from gripmoe.training.base_model import base_scores, fault_of
from gripmoe.worlds.shipped import FOLDER


def trained(name: str, models: dict[str, EmbeddedModel], results: Path) -> Path:
    """The folder of the model `name`, trained there with the models that it is made from."""
    row, output = models[name].model_copy(update={"shipped": None}), results / name / "model.json"
    base = {"base": trained(row.base, models, results) / "model.json"} if row.base else {}
    settings, made_with = row.model_dump(mode="json"), output.with_name("made_with.json")
    code = code_fingerprint("gripmoe.cli.prepare_model:prepare_model")
    wanted = {"settings": settings, "code": code, "base": read_json(base["base"])["weights"] if base else []}
    if not output.exists() or not made_with.exists() or read_json(made_with) != wanted:
        command("prepare-model", settings=json.dumps(settings), output=output, **base)
        write_json(made_with, wanted)
    return output.parent


@torch.no_grad()
def rounded(folder: Path, row: EmbeddedModel):
    """The model of a folder with its parameters rounded to bf16, its tokenizer, how it was made, and its scores."""
    model, tokenizer = load_model(folder / "weights", device="cpu")
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    card = read_json(folder / "model.json")
    made = {key: card[key] for key in ("seed", "final_loss", "tokens") if key in card}
    return model, tokenizer, {"weights": weights_digest(model), **made}, base_scores(model, tokenizer, row)


def write(model, tokenizer, card: dict, folder: Path) -> None:
    with atomic_path(folder) as temporary:
        model.bfloat16().save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_json(temporary / "card.json", card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results/base"))
    parser.add_argument("--write", action="store_true", help="replace the models of the package")
    args = parser.parse_args()
    models, rows, made_here = Project(CONFIG, "tiny").models, [], []
    shipped = {name: row for name, row in models.items() if row.source == "embedded" and row.shipped}
    for name, row in shipped.items():
        model, tokenizer, made, scores = rounded(trained(name, models, args.results), row)
        if fault := fault_of(scores, row):
            raise SystemExit(f"{name} is not fit for use: {fault}")
        card = made | scores | {"family": row.family, "trained_on": row.trained_on}
        made_here.append((model, tokenizer, card, FOLDER / row.shipped))
        in_package = read_json(FOLDER / row.shipped / "card.json")
        rows += [(name, key, in_package.get(key), value) for key, value in card.items()]
    for model in made_here if args.write else ():
        write(*model)
    print(pd.DataFrame(rows, columns=["model", "score", "in the package", "trained here"]).to_string(index=False))


if __name__ == "__main__":
    main()
