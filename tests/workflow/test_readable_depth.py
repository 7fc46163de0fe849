"""What the original reads from unlearned models: the script measures the runs that are there."""

import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest

from conftest import small_model
from gripmoe.io.files import write_jsonl
from gripmoe.moe.storage import save_model
from gripmoe.worlds.benchmark import question_rows

WORKFLOW = Path(__file__).parents[2] / "workflow"


def measured(monkeypatch, results, output):
    flags = ["--worlds", "tiny", "tiny_muse", "--results", results, "--output", output]
    monkeypatch.setattr(sys, "argv", ["finished_runs.py", "readable_depth", *map(str, flags)])
    runpy.run_path(str(WORKFLOW / "finished_runs.py"))["main"]()
    return pd.read_csv(output)


def test_the_runs_that_are_there_are_measured(world, tokenizer, tmp_path, monkeypatch):
    """The original reads its own states as well as itself, on forget and on retain questions; news is left out."""
    for seed, name in enumerate(("tiny_a", "tiny_a_retrained", "tiny_news_a")):
        model = small_model(vocabulary_size=len(tokenizer), seed=seed)
        save_model(model, tokenizer, tmp_path / "models" / name / "weights")
    for domain, facts in (("forget", world.facts.forget), ("retain", world.facts.retain)):
        rows = question_rows(world, facts[:30], orders=1, seed=0)
        write_jsonl(tmp_path / "data" / "wmdp_tiny" / f"{domain}_questions.jsonl", rows)
    table = measured(monkeypatch, tmp_path, tmp_path / "depth.csv")
    read = ["read_above_layer_0", "retain_read_above_layer_0"]
    found = table.pivot(index="method", columns="metric", values="value")
    assert list(found) == read and list(found.index) == ["original", "retrained"]
    assert (found.loc["original"] != found.loc["retrained"]).all()


def test_results_without_runs_are_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        measured(monkeypatch, tmp_path, tmp_path / "depth.csv")
    assert "no run of tiny, tiny_muse has weights in" in capsys.readouterr().err
