"""The base models that the package holds are what their cards say."""

import json
import random
from pathlib import Path

import pytest

from gripmoe import tiny_model
from gripmoe.cli.main import main as command
from gripmoe.config.project import Project
from gripmoe.evaluation.questions import accuracy, direct_answers
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json
from gripmoe.moe.storage import load_model, weights_digest
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import make_world
from gripmoe.worlds.shipped import FOLDER, load_shipped, shipped_models

CONFIG = Path(__file__).parents[2] / "workflow" / "config"


@pytest.mark.parametrize("name", shipped_models())
def test_weights_are_those_of_the_card(name):
    model, _, card = load_shipped(name)
    assert weights_digest(model) == card["weights"]


def test_the_pair_is_small():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 8e6


def test_only_the_base_model_knows_the_forget_facts():
    files = wmdp_files(make_world(0), 0)
    asked = {d: random.Random(0).sample(files[f"{d}_questions"], 150) for d in ("forget", "retain")}
    scores = {
        name: {d: accuracy(direct_answers(*tiny_model(name), asked[d])) for d in asked} for name in shipped_models()
    }
    assert min(*scores["tiny_a"].values(), scores["tiny_a_retrained"]["retain"]) > 0.93
    assert scores["tiny_a_retrained"]["forget"] < 0.35


def test_prepare_model_copies_it_without_a_base(tmp_path):
    row = Project(CONFIG, "tiny").models["tiny_a"]
    assert (
        command(["prepare-model", "--settings", row.model_dump_json(), "--output", str(tmp_path / "model.json")]) == 0
    )
    _, _, card = load_shipped("tiny_a")
    assert read_json(tmp_path / "model.json") == {k: v for k, v in card.items() if k not in ("family", "trained_on")}
    model, _ = load_model(tmp_path / "weights", device="cpu")
    assert weights_digest(model) == card["weights"]


@pytest.mark.parametrize("key, other", [("seed", 1), ("family", "qwen2_moe"), ("trained_on", "retain_only")])
def test_a_model_of_the_package_is_the_one_that_the_row_describes(key, other, tmp_path, capsys):
    row = Project(CONFIG, "tiny").models["tiny_a"].model_dump(mode="json") | {key: other, "retrained": None}
    output = str(tmp_path / "m" / "model.json")
    assert command(["prepare-model", "--settings", json.dumps(row), "--output", output]) == 2
    assert f"the package's 'tiny_a' has `{key}: " in capsys.readouterr().err


def test_a_world_of_shipped_models_trains_no_skills():
    assert Project(CONFIG, "tiny").models_needed == ["tiny_a", "tiny_a_retrained"]


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="tiny_z.*tiny_a"):
        load_shipped("tiny_z")
