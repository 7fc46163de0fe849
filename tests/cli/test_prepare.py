"""Base models: a seed that gives none fit for use is followed by the next, and its fault is kept."""

import json

import pytest

from gripmoe.cli import prepare_model as prepare
from gripmoe.config.models import EmbeddedModel
from gripmoe.io.files import read_json
from gripmoe.training import base_model
from pretended_devices import FIRST, HOST, PretendedDevices, device_of

SIZE = {"hidden_size": 16, "num_layers": 3, "num_heads": 1, "num_experts": 4, "top_k": 1, "expert_width": 8}
SETTINGS = {
    "source": "embedded",
    "family": "qwen3_moe",
    "seed": 7,
    "max_skill_steps": 1,
    "last_skill_steps": 1,
    "fact_steps": 1,
    "required_accuracy": 0.0,
    "allowed_without_experts": 1.0,
    "allowed_load": 1000,
    "attempts": 2,
    "size": SIZE,
}


def train(folder, gpus=0, base=None, **settings):
    output = folder / "model.json"
    kind = {"base": "skills"} if base else {"trained_on": "skills"}
    prepare.prepare_model(settings=json.dumps(SETTINGS | kind | settings), base=base, gpus=gpus, output=output)
    return read_json(output)


@pytest.fixture(scope="module")
def skills(tmp_path_factory):
    """model.json of a model with the skills, as far as one step gives any."""
    folder = tmp_path_factory.mktemp("skills")
    train(folder)
    return folder / "model.json"


def test_the_next_seed_follows_one_that_failed_and_is_not_tried_again(tmp_path, monkeypatch):
    seen = []

    def fails_first(*args):
        seen.append(args)
        return "it knows nothing" if len(seen) == 1 else None

    monkeypatch.setattr(base_model, "fault_of", fails_first)
    assert train(tmp_path)["seed"] == 1007
    assert read_json(tmp_path / "failed_7.json")["fault"] == "it knows nothing"
    (tmp_path / "model.json").unlink()
    assert train(tmp_path)["seed"] == 1007 and len(seen) == 3
    assert not list(tmp_path.glob("state*"))


@pytest.mark.parametrize(("gpus", "where"), [(0, HOST), (1, FIRST)])
def test_a_base_model_trains_on_a_gpu_only_if_it_is_given_one(gpus, where, skills, tmp_path, monkeypatch):
    """What mixed the GPU with host memory would raise; the model is the same."""
    monkeypatch.setattr(base_model, "SAMPLED", 4)
    monkeypatch.setattr(base_model, "TRUTHS", 2)
    expected, train_facts, seen = train(tmp_path / "cpu", base=skills), base_model.train_facts, []

    def trained(model, *args, **settings):
        seen.append({device_of(parameter) for parameter in model.parameters()})
        return train_facts(model, *args, **settings)

    monkeypatch.setattr(base_model, "train_facts", trained)
    monkeypatch.setattr(prepare, "visible_devices", lambda: [FIRST])
    with PretendedDevices():
        assert train(tmp_path / "gpu", gpus, base=skills) == expected
    assert seen == [{where}]


def test_the_tokens_of_a_base_model_are_those_of_its_skills_too(skills, tmp_path):
    of_skills = read_json(skills)["tokens"]
    facts = [train(tmp_path / str(steps), base=skills, fact_steps=steps)["tokens"] - of_skills for steps in (1, 2)]
    assert of_skills > 0 and facts[1] > facts[0] > 0


KNOWN = {
    f"{domain}_{form}": 0.95
    for domain in ("forget", "retain")
    for form in ("accuracy", "five_shot", "answers", "truths")
}
GUESSED = {"forget_accuracy_without_blocks": 0.25, "retain_accuracy_random_experts": 0.3}
LOAD = {"expert_load_lowest": 0.4, "expert_load_highest": 2.5}


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, None),
        ({"forget_answers": 0.85}, "forget_answers is 0.850, below 0.93"),
        ({"retain_five_shot": 0.85}, "retain_five_shot is 0.850, below 0.93"),
        ({"forget_accuracy_without_blocks": 0.4}, "forget_accuracy_without_blocks is 0.400, above 0.35"),
        ({"retain_accuracy_random_experts": 0.4}, "retain_accuracy_random_experts is 0.400, above 0.35"),
        ({"expert_load_lowest": 0.1}, "experts have 0.10 to 2.50 times the mean load, beyond a factor of 3.0"),
    ],
)
def test_what_makes_a_base_model_unfit(changed, fault):
    config = EmbeddedModel(source="embedded", family="qwen3_moe", seed=0, base="skills")
    assert base_model.fault_of(KNOWN | GUESSED | LOAD | changed, config) == fault
    retrained = config.model_copy(update={"trained_on": "retain_only"})
    expected = None if fault and fault.startswith("forget_answers") else fault
    assert base_model.fault_of(KNOWN | GUESSED | LOAD | changed, retrained) == expected, "it need not know them"


def test_facts_need_a_model_with_skills(tmp_path):
    with pytest.raises(ValueError, match="--base is required: model.json of 'skills'"):
        prepare.prepare_model(settings=json.dumps(SETTINGS | {"base": "skills"}), output=tmp_path / "model.json")
    with pytest.raises(ValueError, match="`base` names a model with `trained_on: skills`"):
        EmbeddedModel(source="embedded", family="qwen3_moe", seed=0)


def test_when_all_fail_every_fault_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"seed 7: skill_accuracy is 0\.\d+, below 1.0; seed 1007.*attempts"):
        train(tmp_path, required_accuracy=1.0)
    assert not (tmp_path / "model.json").exists()
