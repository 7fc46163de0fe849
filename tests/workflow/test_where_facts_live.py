"""Where the embedded models' facts live: what the interventions touch, and that the record says what was measured."""

import re
import runpy
from pathlib import Path

import pandas as pd
import torch

from conftest import SMALL
from gripmoe.worlds.models import make_model

ROOT = Path(__file__).parents[2]
script = runpy.run_path(str(ROOT / "workflow" / "where_facts_live.py"))


def changed(model, other):
    """Names of the weights that differ."""
    found, known = model.state_dict(), other.state_dict()
    return {name for name in found if not torch.equal(found[name], known[name])}


def models(tokenizer):
    return [make_model("qwen3_moe", len(tokenizer), seed=seed, **SMALL) for seed in (0, 0, 1)]


def test_experts_and_routers_are_replaced_and_nothing_else(tokenizer):
    model, start, fresh = models(tokenizer)
    script["replace_blocks"](model, fresh)
    blocks = {name for name in model.state_dict() if ".mlp." in name}
    assert changed(model, start) == blocks and not blocks & changed(model, fresh)


def test_the_page_of_base_models_says_what_was_measured():
    folder = ROOT / "docs" / "record" / "base_models"
    table, page = pd.read_csv(folder / "where_facts_live.csv"), (folder / "README.md").read_text()
    shown = re.findall(
        r"(\d\.\d\d) \| (\d\.\d\d) \|$", page.partition("## Where the facts live")[2], flags=re.MULTILINE
    )
    erased = table[table.intervention.str.contains("words")]
    assert erased.forget_accuracy.min() > 0.27 and "No number of words that was tried reaches the forget target" in page
    whole, ten = table.iloc[0], erased.iloc[0]
    lost = [whole[f"{domain}_accuracy"] - ten[f"{domain}_accuracy"] for domain in ("forget", "retain")]
    assert "{:.2f} fewer of the forget questions, and {:.2f} fewer".format(*lost) in page
    assert shown == [(f"{row.forget_accuracy:.2f}", f"{row.retain_accuracy:.2f}") for row in table.itertuples()]
