"""The scripts behind docs/erasure.md: settings against relearning, and what each expert contributes."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from conftest import small_model
from gripmoe.attacks.base import QuestionSetting
from gripmoe.attacks.relearning import from_other_facts, of_low_rank_experts
from gripmoe.attacks.restoration import without_expert
from gripmoe.config.project import Project
from gripmoe.config.world import RunKey
from gripmoe.evaluation.questions import direct_answers, load_questions
from gripmoe.io.files import write_json, write_jsonl
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model, save_model
from gripmoe.worlds.benchmark import question_rows, wmdp_files

WORKFLOW = Path(__file__).parents[2] / "workflow"


def run(script, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [script, *map(str, flags)])
    runpy.run_path(str(WORKFLOW / script))["main"]()


@pytest.fixture(scope="module")
def results(world, tokenizer, tmp_path_factory):
    """A base model, its retrained twin, and the data of a benchmark."""
    folder = tmp_path_factory.mktemp("results")
    for seed, name in enumerate(("tiny_a", "tiny_a_retrained")):
        model = small_model(vocabulary_size=len(tokenizer), seed=seed)
        save_model(model, tokenizer, folder / "models" / name / "weights")
    files, data = wmdp_files(world, 0), folder / "data" / "wmdp_tiny_erasure"
    for name, rows in files.items():
        write_jsonl(data / f"{name}.jsonl", rows[:400])
    for domain, facts in (("forget", world.facts.forget), ("retain", world.facts.retain)):
        write_jsonl(data / f"{domain}_questions.jsonl", question_rows(world, facts[:30], orders=1, seed=0))
    return folder


def test_an_attempt_takes_all_steps_and_is_measured_on_dev_and_test_questions(results, monkeypatch):
    """The dev questions are attacked with documents about the facts of the test questions."""
    script = runpy.run_path(str(WORKFLOW / "attempt.py"))
    asked = []

    def trained(project, results, run, folder):
        asked.append(run)
        shutil.copytree(results / "models" / "tiny_a" / "weights", folder / "weights")
        write_json(folder / "checkpoint.json", {"status": "not_reached", "steps": run.training.max_steps})

    monkeypatch.setitem(script["attempt"].__globals__, "train", trained)
    key = RunKey("tiny_a", "wmdp_tiny_erasure", "unlikelihood", "frozen_router", 0)
    project = Project(WORKFLOW / "config", "tiny_erasure_tuning")
    row = script["attempt"](project, results, key, 80, {"sharpness_radius": 0.5, "alpha": 2.0})
    (run,) = asked
    assert (run.training.max_steps, run.training.sharpness_radius, run.training.objective["alpha"]) == (80, 0.5, 2.0)
    assert run.training.checks_to_stop > run.training.max_steps and row["steps"] == 80
    assert row["routing_stability"] == 1.0 and json.loads(row["change"]) == {"sharpness_radius": 0.5, "alpha": 2.0}
    assert set(script["MEASURED"]) < set(row)

    swapped = script["Swapped"](None, None, None, results / "data" / "wmdp_tiny_erasure", run.benchmark)
    splits = [{question["split"] for question in questions} for questions in (swapped.sample, swapped.dev)]
    assert splits == [{"dev"}, {"test"}]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"--method": "frozen_ruoter"}, "--method: unknown name 'frozen_ruoter'; did you mean 'frozen_router'"),
        ({"--world": "tiny_erasur"}, "world 'tiny_erasur': no world"),
        (
            {"--method": "original"},
            "no run tiny_a.wmdp_tiny_erasure.unlikelihood.original.0: give a benchmark of the model",
        ),
        ({"--benchmark": "wmdp_tiny_erasure_1"}, "no run tiny_a.wmdp_tiny_erasure_1"),
        ({"--change": '{"sharpness": 1}'}, "sharpness"),
        ({"--change": '{"adversary_steps": 2, "sharpness_radius": 1}'}, "give one of `adversary_steps` and"),
    ],
)
def test_a_mistake_in_an_attempt_is_told_before_anything_is_made(flags, said, tmp_path, monkeypatch, capsys):
    given = {"--method": "frozen_router", "--change": "{}", "--output": tmp_path / "a.csv"} | flags
    with pytest.raises(SystemExit, match="2"):
        run("attempt.py", monkeypatch, *(part for pair in given.items() for part in pair))
    assert said in " ".join(capsys.readouterr().err.split()) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--methods", "--objectives"])
def test_a_name_that_no_run_has_is_told_before_anything_is_measured(flag, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("finished_runs.py", monkeypatch, "expert_attribution", flag, "no-such", "--output", tmp_path / "a.csv")
    assert f"{flag}: unknown name 'no-such'" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_attempts_are_kept_by_what_was_tried(tmp_path):
    """A repeated attempt replaces its row; one on another base model does not; a diverged one has no measurements."""
    script = runpy.run_path(str(WORKFLOW / "attempt.py"))
    row = dict.fromkeys(script["SAME"], "same") | {"status": "reached", "forget_accuracy": 0.5}
    for change in ({}, {"forget_accuracy": 0.25}, {"model": "tiny_b"}):
        script["add_row"](tmp_path / "a.csv", row | change)
    script["add_row"](tmp_path / "a.csv", {**dict.fromkeys(script["SAME"], "other"), "status": "diverged"})
    table = pd.read_csv(tmp_path / "a.csv")
    assert table.forget_accuracy.tolist()[:2] == [0.25, 0.5] and table.model.tolist() == ["same", "tiny_b", "other"]
    assert table.forget_accuracy.isna().tolist() == [False, False, True]


def test_each_expert_has_what_the_answers_lose_without_it(results, tmp_path, monkeypatch):
    output = tmp_path / "experts.csv"
    flags = "--results", results, "--output", output, "--methods", "original"
    run("finished_runs.py", monkeypatch, "expert_attribution", *flags)
    table, moe = pd.read_csv(output), MoEModel(small_model())
    assert set(table.method) == {"original"} and set(table.model) == {"tiny_a"}
    assert len(table) == len(moe.layers) * moe.num_experts == len(table[["layer", "expert"]].drop_duplicates())
    weights = results / "models" / "tiny_a" / "weights"
    model, tokenizer = load_model(weights)
    moe, retain = MoEModel(model), load_questions(results / "data/wmdp_tiny_erasure/retain_questions.jsonl", "test")

    def score():
        letters = [torch.tensor(answer.letter_logprobs) for answer in direct_answers(model, tokenizer, retain)]
        right = [of.log_softmax(0)[question["answer"]] for of, question in zip(letters, retain, strict=True)]
        return torch.stack(right).mean().item()

    whole, row = score(), table.loc[table.retain.abs().idxmax()]
    with without_expert(moe, row.layer, row.expert):
        assert row.retain == pytest.approx(whole - score(), rel=1e-3) and row.retain != 0
    assert row.forget != row.retain


def test_longer_relearning_goes_on_where_the_attack_of_a_run_ends(results, tmp_path, monkeypatch):
    """Its first 20 steps are those of the attack, and the weights are the same for both kinds of updates."""
    output = tmp_path / "longer.csv"
    flags = "--worlds", "tiny_erasure", "--methods", "retrained", "--steps", 20, 21
    run("finished_runs.py", monkeypatch, "longer_relearning", "--results", results, "--output", output, *flags)
    table = pd.read_csv(output).set_index("metric").value
    names = [f"relearned_{kind}after_{step}" for kind in ("", "lora_") for step in (20, 21)]
    assert sorted(table.index) == sorted(names)
    model, tokenizer = load_model(results / "models" / "tiny_a_retrained" / "weights")
    project = Project(WORKFLOW / "config", "tiny_erasure")
    moe, benchmark = MoEModel(model), project.benchmarks["wmdp_tiny_erasure"]
    given = tokenizer, results / "data" / "wmdp_tiny_erasure", benchmark
    setting = QuestionSetting(moe, moe, *given, finetuning=project.world.relearning)
    for attack, name in ((from_other_facts, "relearned"), (of_low_rank_experts, "relearned_lora")):
        assert attack(setting).metrics[f"{name}_after_20"] == pytest.approx(table[f"{name}_after_20"], abs=1e-6)
