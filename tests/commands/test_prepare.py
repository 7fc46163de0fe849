"""Base models: a seed that gives none fit for use is followed by the next, and its fault is kept."""

import json
from argparse import Namespace

import pytest

from gripmoe.commands import prepare
from gripmoe.files import read_json

SETTINGS = {
    "source": "embedded",
    "family": "qwen3_moe",
    "seed": 7,
    "max_early_steps": 1,
    "late_steps": 1,
    "required_accuracy": 0.0,
    "attempts": 2,
    "size": {"hidden_size": 16, "num_layers": 1, "num_heads": 1, "num_experts": 4, "top_k": 1, "expert_width": 8},
}


def train(folder, **settings):
    prepare.prepare_model(Namespace(settings=json.dumps(SETTINGS | settings), output=folder / "model.json"))
    return read_json(folder / "model.json")


def test_the_next_seed_follows_one_that_failed_and_is_not_tried_again(tmp_path, monkeypatch):
    measured = prepare._base_scores
    seen = []

    def fails_first(*args):
        seen.append(args)
        return ({"forget_accuracy": 0.1}, "it knows nothing") if len(seen) == 1 else measured(*args)

    monkeypatch.setattr(prepare, "_base_scores", fails_first)
    assert train(tmp_path)["seed"] == 1007
    assert read_json(tmp_path / "failed_7.json")["fault"] == "it knows nothing"
    (tmp_path / "model.json").unlink()
    assert train(tmp_path)["seed"] == 1007 and len(seen) == 3
    assert not list(tmp_path.glob("state*"))


def test_when_all_fail_every_fault_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"seed 7: it answers 0\.\d+ of the forget.*seed 1007.*below 1\.0.*attempts"):
        train(tmp_path, required_accuracy=1.0)
    assert not (tmp_path / "model.json").exists()
