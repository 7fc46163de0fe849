"""`gripmoe finetune-model`: from one seed after the other, until a model knows what it was trained on."""

import json

import pytest

from conftest import SMALL
from gripmoe.cli import finetune_model as finetuning
from gripmoe.cli.main import main
from gripmoe.io.files import read_json, write_json
from gripmoe.moe.storage import save_model
from gripmoe.worlds.models import make_model

SETTINGS = {"source": "finetuned", "base": "base", "benchmark": "muse", "epochs": 1, "learning_rate": 1e-3}
SETTINGS |= {"batch_size": 16, "trained_on": "retain_only", "trains": "blocks", "required": 50.0}
DATA = {"source": "embedded", "kind": "news"}


@pytest.fixture
def finetune(tokenizer, tmp_path, monkeypatch):
    """Finetunes a random model whose `knowmem_retain` is what a test says, attempt by attempt."""
    model = make_model("qwen3_moe", len(tokenizer), seed=0, **SMALL)
    write_json(tmp_path / "base" / "model.json", {"weights": save_model(model, tokenizer, tmp_path / "base/weights")})
    assert main(["prepare-data", "--settings", json.dumps(DATA), "--output", str(tmp_path / "data")]) == 0
    monkeypatch.setattr(finetuning, "leakage", lambda *_: {})

    def finetuned(name, known, **changes):
        scores = iter(known)
        monkeypatch.setattr(finetuning, "news_scores", lambda *_: {"knowmem_retain": {"a": next(scores), "b": 40.0}})
        documents = {"data": DATA, "retain_documents": 40, "max_length": 32}
        flags = {"settings": json.dumps(SETTINGS | changes), "benchmark": json.dumps(documents)}
        flags |= {"model": tmp_path / "base/model.json", "data": tmp_path / "data"}
        flags |= {"output": tmp_path / name / "model.json"}
        return main(["finetune-model", *(f"--{flag}={value}" for flag, value in flags.items())])

    return finetuned


def test_the_first_seed_that_reaches_what_is_required_is_kept(finetune, tmp_path):
    """Its weights are those of this seed alone, and no state stays."""
    assert finetune("second", [50.0, 70.0], attempts=2) == 0
    assert finetune("alone", [70.0], seed=1000) == 0
    assert finetune("first", [70.0], attempts=2) == 0
    made = {name: read_json(tmp_path / name / "model.json") for name in ("second", "alone", "first")}
    assert [made[name]["seed"] for name in made] == [1000, 1000, 0]
    assert made["second"]["weights"] == made["alone"]["weights"] != made["first"]["weights"]
    assert made["second"]["knowmem_retain"] == 55.0
    assert not list(tmp_path.rglob("state*"))


def test_if_none_does_every_fault_is_named(finetune, tmp_path, capsys):
    assert finetune("none", [50.0, 58.0], attempts=2) == 2
    said = "did not reach the required 50: seed 0: knowmem_retain 45.0; seed 1000: knowmem_retain 49.0. Give it more"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "none" / "model.json").exists()
