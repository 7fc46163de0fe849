"""At which depth forget facts are readable: the script measures the runs that are there, each once."""

import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest

from conftest import small_model
from gripmoe.io.files import write_jsonl
from gripmoe.moe.storage import save_model
from gripmoe.worlds.benchmark import question_rows

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "workflow" / "readable_depth.py"))


def measured(monkeypatch, results, output):
    flags = ["--world", "tiny", "--results", results, "--output", output]
    monkeypatch.setattr(sys, "argv", ["readable_depth.py", *map(str, flags)])
    SCRIPT["main"]()
    return pd.read_csv(output)


def test_each_run_is_measured_once(world, tokenizer, tmp_path, monkeypatch):
    for seed, name in enumerate(("tiny_a", "tiny_a_retrained")):
        save_model(
            small_model(vocabulary_size=len(tokenizer), seed=seed), tokenizer, tmp_path / "models" / name / "weights"
        )
    questions = question_rows(world, world.facts.forget[:20], orders=1, seed=0)
    write_jsonl(tmp_path / "data" / "wmdp_tiny" / "forget_questions.jsonl", questions)
    output = tmp_path / "depth.csv"
    table = measured(monkeypatch, tmp_path, output)
    assert table.groupby("method").metric.unique().map(list).to_dict() == {
        "original": ["read_above_layer_0"],
        "retrained": ["read_above_layer_0"],
    }
    edited = table.assign(value=7.0)
    edited.to_csv(output, index=False)
    assert measured(monkeypatch, tmp_path, output).equals(edited), "nothing is measured again"


def test_results_without_runs_are_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        measured(monkeypatch, tmp_path, tmp_path / "depth.csv")
    assert "no run of tiny has weights in" in capsys.readouterr().err
