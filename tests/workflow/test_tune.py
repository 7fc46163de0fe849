"""The script that chooses the tiny world's hyperparameters."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from gripmoe.config.project import Project
from gripmoe.io.files import write_json, write_text

SCRIPT = Path(__file__).parents[2] / "workflow" / "tune.py"


@pytest.fixture(scope="module")
def tune():
    spec = importlib.util.spec_from_file_location("tune", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(*trials):
    columns = ["model", "objective", "method", "setting", "retain_accuracy", "status", "steps"]
    return pd.DataFrame([dict(zip(columns, trial, strict=True)) for trial in trials])


def test_what_reaches_the_target_in_every_trial_and_retains_most_is_chosen(tune):
    trials = table(
        ("a", "gd", "m", "slow", 0.9, "reached", 80),
        ("b", "gd", "m", "slow", 0.7, "reached", 80),
        ("a", "gd", "m", "fast", 0.7, "reached", 20),
        ("b", "gd", "m", "fast", 0.9, "reached", 20),
        ("a", "gd", "m", "best on one", 1.0, "reached", 10),
        ("b", "gd", "m", "best on one", 1.0, "not_reached", 600),
        ("a", "kl", "m", "slow", 0.3, "reached", 80),
        ("b", "kl", "m", "slow", 0.3, "reached", 80),
        ("a", "rmu", "m", "slow", 0.9, "diverged", 80),
    )
    picked = trials[tune.chosen(trials, "retain_accuracy")]
    assert {(row.objective, row.setting) for row in picked.itertuples()} == {("gd", "fast"), ("kl", "slow")}


def test_a_setting_whose_runs_differ_is_worth_less(tune):
    trials = table(
        ("a", "gd", "m", "steady", 0.70, "reached", 80),
        ("b", "gd", "m", "steady", 0.70, "reached", 80),
        ("a", "gd", "m", "chancy", 0.95, "reached", 80),
        ("b", "gd", "m", "chancy", 0.55, "reached", 80),
    )
    assert set(trials[tune.chosen(trials, "retain_accuracy")].setting) == {"steady"}


def test_a_trial_runs_once_and_what_it_has_left_is_not_thrown_away(tune, tmp_path, monkeypatch):
    asked = []

    def unlearned(name, output, **flags):
        asked.append(name)
        output.write_text(json.dumps({"status": "reached", "steps": 5}))
        (output.parent / "history.json").write_text(json.dumps([{"forget_accuracy": 0.2, "retain_accuracy": 0.8}]))

    monkeypatch.setattr(tune, "command", unlearned)
    project = Project(tune.CONFIG, "tiny")
    base = tmp_path / "models" / "tiny_a" / "model.json"
    write_json(base, {"weights": "first"})
    write_json(tmp_path / "models" / "tiny_a_retrained" / "model.json", {"weights": "of the retrained model"})
    trace = tmp_path / "tiny_a" / "wmdp_tiny" / "routing.safetensors"
    for file in (trace, trace.with_name("routing_forget.safetensors")):
        write_text(file, "recorded")
    questions = tmp_path / "data" / "wmdp_tiny" / "forget_questions.jsonl"
    write_text(questions, "asked")

    def trial():
        change = {"learning_rate": 1e-3, "alpha": 3.0}
        return tune.trial(project, tmp_path, "tiny_a", "wmdp_tiny", "gd", "router_l2", 1000, change)

    first = trial()
    assert first == trial() and asked == ["unlearn"]
    assert first["retain_accuracy"] == 0.8 and first["setting"] == "learning_rate-0.001_alpha-3.0"
    (folder,) = tmp_path.rglob("router_l2/*/1000")
    (folder / "state.pt").write_text("of a run that goes on, or was killed")
    (folder / "checkpoint.json").unlink()
    trial()
    assert asked == ["unlearn"] * 2 and (folder / "state.pt").exists()
    (folder / "run.yaml").write_text((folder / "run.yaml").read_text().replace("seed: 1000", "seed: 1001"))
    trial()
    assert asked == ["unlearn"] * 3, "what was tried under other settings is tried again"
    write_json(base, {"weights": "trained again"})
    trial(), trial()
    assert asked == ["unlearn"] * 4, "and what was tried on other weights"
    for file in (questions, trace):
        write_text(file, "another")
        trial(), trial()
    assert asked == ["unlearn"] * 6, "and what was tried on other data"


def test_models_data_and_traces_are_made_first(tune, monkeypatch):
    asked = []

    def ran(command, cwd):
        asked.extend(command)
        return subprocess.CompletedProcess(command, len(asked) > len(command))  # the second one fails

    monkeypatch.setattr(subprocess, "run", ran)
    project = Project(tune.CONFIG, "tiny_muse_tuning")
    folder = SCRIPT.parents[1] / project.results
    tune.prepare(project, folder, ["tiny_news_tuning_a"], "muse_tiny", cores=2)
    made = ["models/tiny_news_tuning_a_retrained/model.json", "tiny_news_tuning_a/muse_tiny/routing.json"]
    assert asked[-2:] == [f"results/tiny/{name}" for name in made] and f"world={project.world_file}" in asked
    with pytest.raises(SystemExit, match="snakemake could not make"):
        tune.prepare(project, folder, ["tiny_news_tuning_a"], "muse_tiny", cores=2)


def test_a_mistyped_setting_is_named_before_anything_is_made(tune, monkeypatch, capsys, tmp_path):
    file = tmp_path / "tuning.yaml"
    text = tune.TUNING.read_text()
    assert "learning_rate" in text
    file.write_text(text.replace("learning_rate", "learning_rat"))
    monkeypatch.setattr(tune, "TUNING", file)
    monkeypatch.setattr(tune, "prepare", lambda *_: pytest.fail("models were made"))
    monkeypatch.setattr(sys, "argv", ["tune.py", "--objectives", "gd"])
    with pytest.raises(SystemExit):
        tune.main()
    assert "tuning.yaml: learning_rat: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--objectives", "nope"], "--objectives: 'nope' is none of gd, kl, npo, rmu"),
        (["--objectives", "gd", "--methods", "seuf"], "--methods: 'seuf' is none of anchored, expert_specific"),
    ],
)
def test_mistakes_are_named(tune, flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune.py", *flags])
    with pytest.raises(SystemExit):
        tune.main()
    assert message in capsys.readouterr().err
