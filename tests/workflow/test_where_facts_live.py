"""Where the embedded models' facts live: what the interventions touch, and that the record says what was measured."""

import re
import runpy
from collections import Counter
from pathlib import Path

import pandas as pd
import torch

from conftest import SMALL
from gripmoe.worlds.benchmark import wmdp_files
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


def test_the_words_most_frequent_in_forget_documents_are_erased_and_no_other_word(world, tokenizer):
    model, start, fresh = models(tokenizer)
    files = wmdp_files(world, 0)
    script["erase_words"](model, tokenizer, files, fresh)
    (name,) = changed(model, start) - {"lm_head.weight"}  # which may be tied to it
    touched = (model.state_dict()[name] != start.state_dict()[name]).any(dim=1).nonzero()[:, 0].tolist()
    assert len(touched) == script["ERASED_WORDS"]
    shares = {}
    for domain in ("forget", "retain"):
        ids = [id for row in files[f"{domain}_corpus"] for id in tokenizer(row["prompt"] + row["text"])["input_ids"]]
        shares[domain] = {id: count / len(ids) for id, count in Counter(ids).items()}
    excess = {id: share - shares["retain"].get(id, 0.0) for id, share in shares["forget"].items()}
    others = [excess[id] for id in excess.keys() - set(touched)]
    assert min(excess[id] for id in touched) >= max(others)


def test_the_record_and_the_readme_say_what_was_measured():
    table = pd.read_csv(ROOT / "docs" / "record" / "where_facts_live.csv")
    record, readme = (ROOT.joinpath(*path).read_text() for path in (("docs", "record.md"), ("README.md",)))
    written = [re.findall(r"\d\.\d\d, \d\.\d\d", line) for line in record.partition("Read this first")[2].splitlines()]
    written = [cells for cells in written if cells][:7]
    for number, model in enumerate(("tiny_a", "tiny_b")):
        rows = pd.concat([table[table.model == model], table[table.model == f"{model}_retrained"]])
        measured = [f"{row.forget_accuracy:.2f}, {row.retain_accuracy:.2f}" for row in rows.itertuples()]
        assert [cells[number] for cells in written] == measured
    of = table.set_index(["intervention", "steps", "model"]).forget_accuracy
    words, replaced, trained = (table.intervention.unique()[number] for number in (1, 2, 3))
    pairs = [[f"{of[what, steps, model]:.2f}" for model in ("tiny_a", "tiny_b")] for what, steps in
             ((replaced, 0), (trained, 80), (words, 0))]  # fmt: skip
    said = " ".join(readme.partition("do not keep their facts in experts")[2].split())
    assert "returned from {} and {} to {} and {}.".format(*pairs[0], *pairs[1]) in said
    assert "fell to {} and {}".format(*pairs[2]) in said
