"""What the record still lacks, in which order it is computed and how long it takes."""

import runpy
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest

from gripmoe.config.project import Project
from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.io.files import write_json

ROOT = Path(__file__).parents[2]
script = runpy.run_path(str(ROOT / "workflow" / "make_record.py"))
PROJECT = Project(ROOT / "workflow" / "config", "record_main")


def finish(results, keys):
    for key in keys:
        write_json(results / key.folder / "attack.json", {})


def test_a_block_covers_all_base_models_and_all_blocks_cover_the_world():
    found = list(script["blocks"](PROJECT))
    for name, keys in found:
        assert {key.model for key in keys} == set(PROJECT.world.models), name
        assert len({(key.objective, key.seed) for key in keys if key.objective != NO_OBJECTIVE}) == 1, name
    assert {key for _, keys in found for key in keys} == set(PROJECT.run_keys())
    assert [name for name, _ in islice(found, 2)] == ["record_main, gd, seed 0", "record_main, kl, seed 0"]


def test_what_is_there_is_not_missing_and_takes_no_time(tmp_path):
    times = pd.Series({"unlearn": 40.0, "realign": 5.0, "evaluate": 10.0, "attack": 15.0, "prepare_model": 100.0})
    runs = PROJECT.run_keys()
    trained = [key for key in runs if PROJECT.methods[key.method].trains]
    corrected = [key for key in runs if PROJECT.methods[key.method].corrects]
    models = 100 * len(PROJECT.models_needed)
    whole = 40 * len(trained) + 5 * len(corrected) + 25 * len(runs) + models
    assert list(script["remaining"]([PROJECT], tmp_path, times)) == [pytest.approx(whole)]
    assert list(script["remaining"]([PROJECT, PROJECT], tmp_path, times))[1] == 0.0, "of the first world"
    kept = set(trained[3:])
    assert set(script["missing"](PROJECT, tmp_path, kept)) == set(runs) - kept
    assert list(script["remaining"]([PROJECT], tmp_path, times, kept)) == [pytest.approx(whole - 65 * len(kept))]
    finish(tmp_path, trained[:3])
    assert set(script["missing"](PROJECT, tmp_path)) == set(runs) - set(trained[:3])
    assert list(script["remaining"]([PROJECT], tmp_path, times)) == [pytest.approx(whole - 3 * 65)]


def test_a_record_is_not_made_of_tables_that_could_not_be_written_again(tmp_path, monkeypatch):
    finish(tmp_path, PROJECT.run_keys()[:1])
    (tmp_path / "runs_record_main.csv").write_text("of an earlier session")
    with pytest.raises(SystemExit):
        script["collect"](PROJECT, tmp_path, None)


def test_times_are_those_of_runs_that_are_there_before_those_of_the_record(tmp_path, monkeypatch):
    of_record = tmp_path / "step_times.csv"
    of_record.write_text("step,jobs,cpu_seconds,longest\nattack,3,15.0,16.0\nevaluate,3,10.0,11.0\n")
    monkeypatch.setitem(script["step_times"].__globals__, "TIMES", of_record)
    for name, seconds in (("a", 20), ("b", 30)):
        record = {"step": "gripmoe.cli.attack:attack", "cpu_seconds": seconds}
        write_json(tmp_path / "results" / name / "attack.provenance.json", record)
    assert script["step_times"](tmp_path / "results").to_dict() == {"attack": 25.0, "evaluate": 10.0}


def test_runs_are_added_to_the_record_only_if_base_models_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(script["require_same_models"].__globals__, "RECORD", tmp_path / "runs.csv")
    model = tmp_path / "results" / "models" / "tiny_b" / "model.json"
    write_json(model, {"final_loss": 0.89792, "skill_accuracy": 0.965, "weights": "a1"})
    script["require_same_models"](tmp_path / "results")  # there is no record
    recorded = tmp_path / "base_models.csv"
    recorded.write_text("model,final_loss,cpu_seconds\ntiny_b,0.8979,12\ntiny_c,0.5,12\n")
    script["require_same_models"](tmp_path / "results")
    recorded.write_text("model,final_loss,cpu_seconds\ntiny_b,0.8812,12\ntiny_c,0.5,12\n")
    with pytest.raises(SystemExit, match="^tiny_b: other models than in .*base_models.csv"):
        script["require_same_models"](tmp_path / "results")
    for digest, is_other in (("a1", False), ("", False), ("b2", True)):
        recorded.write_text(f"model,final_loss,weights,cpu_seconds\ntiny_b,0.8979,{digest},12\n")
        with pytest.raises(SystemExit) if is_other else nullcontext():
            script["require_same_models"](tmp_path / "results")


def test_the_record_is_what_may_be_kept():
    kept = script["recorded"]()
    assert ("tiny_b", "wmdp_tiny", "gd", "anchored", 0) in kept
    assert kept <= {key for world in script["WORLDS"] for key in Project(PROJECT.folder, world).run_keys()}
