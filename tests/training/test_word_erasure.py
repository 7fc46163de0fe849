"""The control that erases words and no fact."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from conftest import SMALL
from gripmoe.cli.main import main
from gripmoe.config.project import Project
from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.data.documents import encode
from gripmoe.io.files import write_json, write_jsonl, write_yaml
from gripmoe.moe.storage import load_model, save_model, weights_digest
from gripmoe.training.word_erasure import ERASED_WORDS, erase_words, fresh_embeddings, words_of
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.models import make_model

PROJECT = Project(Path(__file__).parents[2] / "workflow" / "config", "tiny")


@pytest.fixture(scope="module")
def files(world):
    return wmdp_files(world, 0)


def changed(model, other):
    """Names of the weights that differ."""
    return {name for name, value in model.state_dict().items() if not torch.equal(value, other.state_dict()[name])}


@pytest.fixture(scope="module")
def rows(files, tokenizer):
    return {
        side: [encode(tokenizer, [(row["prompt"] + row["text"], True)]) for row in files[f"{side}_corpus"]]
        for side in ("forget", "retain")
    }


def test_the_words_most_typical_of_forget_documents_are_erased_and_no_other_word(rows, tokenizer):
    model, start = (make_model("qwen3_moe", len(tokenizer), seed=0, **SMALL) for _ in range(2))
    fresh_Vd = fresh_embeddings(model)
    erase_words(model, *rows.values(), fresh_Vd)
    (name,) = changed(model, start) - {"lm_head.weight"}  # which may be tied to it
    embeddings_Vd = model.state_dict()[name]
    touched = (embeddings_Vd != start.state_dict()[name]).any(dim=1).nonzero()[:, 0].tolist()
    assert len(touched) == ERASED_WORDS and torch.equal(embeddings_Vd[touched], fresh_Vd[touched])
    forget, retain = (Counter(token for row in documents for token in row.ids) for documents in rows.values())
    multiple = {token: count / (retain[token] + 0.5) for token, count in forget.items()}
    others = [multiple[token] for token in multiple.keys() - set(touched)]
    assert min(multiple[token] for token in touched) >= max(others)


def test_words_that_all_questions_need_are_not_erased(rows, tokenizer):
    """Without them a model answers no question at all, whatever else it knows."""
    question = encode(tokenizer, [("The following are multiple choice questions (with answers).\nA. B. C. D.", True)])
    assert set(question.ids) <= {
        token for row in rows["forget"] for token in row.ids
    }  # control: forget documents have them
    assert not set(question.ids) & set(words_of(*rows.values())[:ERASED_WORDS])


def test_the_command_writes_the_checkpoint_of_a_run(files, tokenizer, tmp_path):
    """With the weights that it names; the original model stays as it is."""
    original = make_model("qwen3_moe", len(tokenizer), seed=0, **SMALL)
    digest = save_model(original, tokenizer, tmp_path / "model" / "weights")
    write_json(tmp_path / "model" / "model.json", {"weights": digest})
    for side in ("forget", "retain"):
        write_jsonl(tmp_path / "data" / f"{side}_corpus.jsonl", files[f"{side}_corpus"])
    run, output = tmp_path / "run" / "run.yaml", tmp_path / "run" / "checkpoint.json"
    of_run = PROJECT.run("tiny_a", "wmdp_tiny", NO_OBJECTIVE, "erase_words", 0)
    write_yaml(run, of_run.model_dump(mode="json"))
    flags = {"run": run, "model": tmp_path / "model" / "model.json", "data": tmp_path / "data", "output": output}
    assert main(["edit-weights", *(str(part) for name, path in flags.items() for part in (f"--{name}", path))]) == 0
    written = json.loads(output.read_text())
    assert written["status"] == "edited" and written["weights"] != digest
    assert weights_digest(load_model(output.parent / "weights")[0]) == written["weights"]
    assert weights_digest(load_model(tmp_path / "model" / "weights")[0]) == digest
