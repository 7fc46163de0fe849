"""Base models: a seed that gives none fit for use is followed by the next, and its fault is kept."""

import json

import pytest

from conftest import small_model
from gripmoe.cli import prepare_model as prepare
from gripmoe.config.models import EmbeddedModel
from gripmoe.io.files import read_json
from gripmoe.training import base_model
from pretended_devices import FIRST, HOST, PretendedDevices, device_of

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


def train(folder, gpus=0, **settings):
    output = folder / "model.json"
    prepare.prepare_model(settings=json.dumps(SETTINGS | settings), gpus=gpus, output=output)
    return read_json(folder / "model.json")


def test_the_next_seed_follows_one_that_failed_and_is_not_tried_again(tmp_path, monkeypatch):
    measured = base_model.base_scores
    seen = []

    def fails_first(*args):
        seen.append(args)
        return ({"forget_accuracy": 0.1}, "it knows nothing") if len(seen) == 1 else measured(*args)

    monkeypatch.setattr(base_model, "base_scores", fails_first)
    assert train(tmp_path)["seed"] == 1007
    assert read_json(tmp_path / "failed_7.json")["fault"] == "it knows nothing"
    (tmp_path / "model.json").unlink()
    assert train(tmp_path)["seed"] == 1007 and len(seen) == 3
    assert not list(tmp_path.glob("state*"))


@pytest.mark.parametrize(("gpus", "where"), [(0, HOST), (1, FIRST)])
def test_a_base_model_trains_on_a_gpu_only_if_it_is_given_one(gpus, where, tmp_path, monkeypatch):
    """What mixed the GPU with host memory would raise; the model is the same."""
    expected, train_base, seen = train(tmp_path / "cpu"), base_model.train_base, []

    def trained(model, *args, **settings):
        seen.append({device_of(parameter) for parameter in model.parameters()})
        return train_base(model, *args, **settings)

    monkeypatch.setattr(base_model, "train_base", trained)
    monkeypatch.setattr(prepare, "visible_devices", lambda: [FIRST])
    with PretendedDevices():
        assert train(tmp_path / "gpu", gpus) == expected
    assert seen == [{where}]


@pytest.mark.parametrize(
    ("answered", "fault"),
    [
        ((0.95, 0.93, 0.4, 0.5, 0.7, 0.7), None),
        ((0.85, 0.93), "it answers 0.850 of the forget questions, below 0.9"),
        ((0.95, 0.85), "it answers 0.850 of the retain questions, below 0.9"),
        ((0.95, 0.93, 0.6, 0.5, 0.7, 0.7), "it answers 0.600 of the forget questions without any expert, above 0.5"),
    ],
)
def test_what_makes_a_base_model_unfit(answered, fault, monkeypatch):
    """Scores of forget and retain questions: whole, with silenced blocks, under random experts."""
    scores = iter(answered)
    monkeypatch.setattr(base_model, "direct_answers", lambda *arguments: None)
    monkeypatch.setattr(base_model, "accuracy", lambda answers: next(scores))
    config = EmbeddedModel(source="embedded", family="qwen3_moe", seed=0)
    assert base_model.base_scores(small_model(), None, config)[1] == fault
    retrained = config.model_copy(update={"trained_on": "retain_only"})
    scores = iter((0.25, *answered[1:], 0.3, 0.3, 0.3, 0.3))
    told = base_model.base_scores(small_model(), None, retrained)[1]
    assert told == (None if fault and "forget questions, below" in fault else fault), (
        "a retrained model need not know them"
    )


def test_when_all_fail_every_fault_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"seed 7: it answers 0\.\d+ of the forget.*seed 1007.*below 1\.0.*attempts"):
        train(tmp_path, required_accuracy=1.0)
    assert not (tmp_path / "model.json").exists()
