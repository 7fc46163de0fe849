"""A model that others have unlearned becomes the checkpoint of a run, or is refused in one line."""

import json

import pytest
from transformers import AutoModelForCausalLM

from conftest import small_model
from gripmoe.cli.main import main
from gripmoe.io.files import write_json
from gripmoe.moe.storage import load_model, save_model, weights_digest

pytest_plugins = "audit_pairs"


@pytest.fixture
def original(pair, tmp_path):
    """model.json of the original model, beside its weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").symlink_to(pair / "original")
    write_json(tmp_path / "model" / "model.json", {})
    return tmp_path / "model" / "model.json"


def imported(original, external, folder):
    flags = ["--model", original, "--external", external, "--output", folder / "checkpoint.json"]
    return main(["import-checkpoint", *map(str, flags)])


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_folder_of_transformers_becomes_the_checkpoint_of_a_run(pair, original, tmp_path, has_tokenizer):
    """With the very weights, and the tokenizer of the original model."""
    plain, run = tmp_path / "plain", tmp_path / "run"
    _, tokenizer = load_model(pair / "unlearned")
    AutoModelForCausalLM.from_pretrained(pair / "unlearned").save_pretrained(plain, max_shard_size="20KB")
    if has_tokenizer:
        tokenizer.save_pretrained(plain)
    assert len([*plain.glob("*.safetensors")]) > 1 and imported(original, plain, run) == 0
    described = json.loads((run / "checkpoint.json").read_text())
    assert described["status"] == "external" and described["source"] == str(plain)
    digests = {folder: weights_digest(load_model(folder)[0]) for folder in (run / "weights", pair / "original")}
    assert digests[run / "weights"] == described["weights"] != digests[pair / "original"]


@pytest.mark.parametrize("what", ["another", "absent"])
def test_what_does_not_fit_the_original_is_refused_in_one_line(what, original, tokenizer, tmp_path, capsys):
    if what == "another":
        save_model(small_model("qwen3_moe", len(tokenizer), num_experts=4), tokenizer, tmp_path / what)
    assert imported(original, tmp_path / what, tmp_path / "run") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    message = {"another": "--model and --external differ in experts: 8 and 4", "absent": "neither a folder nor a model"}
    assert told.startswith("gripmoe import-checkpoint: error: ") and message[what] in told
    assert not [file for file in (tmp_path / "run").iterdir() if file.name != ".lock"]
