"""Measures how far the experts of the shipped base model specialise, by domain and by token.

    python workflow/specialisation.py --output docs/record/base_models/specialisation.csv

Columns, for each layer: `domain` and `token`, the share that an expert has of the choices of one domain or token, as a
multiple of its share of all choices. Both are the highest over experts; `domain` is the highest over domains, `token`
the median over tokens that occur 50 times or more. `busiest_half` is the share of all choices that the busier half of
the experts takes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from gripmoe.data.documents import collate, encode
from gripmoe.io.files import write_csv
from gripmoe.moe import MoEModel
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import make_world
from gripmoe.worlds.shipped import tiny_model

DOCUMENTS = 600  # of each domain
OFTEN = 50  # occurrences of a token


@torch.no_grad()
def measure(name: str) -> list[dict]:
    model, tokenizer = tiny_model(name)
    moe, files = MoEModel(model), wmdp_files(make_world(0), 0)
    tokens, domains, sets = [], [], {layer: [] for layer in moe.layers}
    for number, domain in enumerate(("forget", "retain")):
        for row in files[f"{domain}_corpus"][:DOCUMENTS]:
            batch = collate([encode(tokenizer, [(row["prompt"] + row["text"], False)])], tokenizer.pad_token_id)
            tokens.append(batch.input_ids[0])
            domains.append(torch.full_like(batch.input_ids[0], number))
            for layer, chosen in moe.routes(**batch.inputs).items():
                sets[layer].append(chosen)
    tokens, domains, rows = torch.cat(tokens), torch.cat(domains), []

    def shares(chosen: torch.Tensor) -> torch.Tensor:
        counts = chosen.flatten().bincount(minlength=moe.num_experts).double()
        return counts / counts.sum()

    for layer, parts in sets.items():
        chosen = torch.cat(parts)
        of_all = shares(chosen)
        by_domain = max((shares(chosen[domains == number]) / of_all).max().item() for number in (0, 1))
        often = [token for token in tokens.unique() if (tokens == token).sum() >= OFTEN]
        by_token = torch.tensor([(shares(chosen[tokens == token]) / of_all).max() for token in often]).median().item()
        busiest = of_all.sort(descending=True).values[: moe.num_experts // 2].sum().item()
        rows.append({"model": name, "layer": layer, "domain": by_domain, "token": by_token, "busiest_half": busiest})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    write_csv(args.output, measure("tiny_a"))
    print(args.output.read_text())


if __name__ == "__main__":
    main()
