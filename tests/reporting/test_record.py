"""The record: its tables are what its own numbers give, and hold what was measured."""

import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from gripmoe.io.files import file_digest, read_json, write_json
from gripmoe.reporting.runs import KEYS
from gripmoe.reporting.tables import Cell, Table

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "record"
RECORDS = [file.parent for file in RECORD.rglob("provenance.json")]
record = runpy.run_path(str(ROOT / "workflow" / "record.py"))


def test_the_tables_are_what_the_numbers_give(tmp_path, monkeypatch):
    drawn_again(RECORD, tmp_path, monkeypatch)
    written = read_json(tmp_path / "provenance.json")["written"]
    assert written["runs.csv"] == file_digest(RECORD / "runs.csv") and written["packages"]["pandas"]


@pytest.mark.nightly
def test_the_replication_is_what_its_numbers_give(tmp_path, monkeypatch):
    drawn_again(RECORD / "replication", tmp_path, monkeypatch, "--before", str(RECORD / "runs.csv"))


def drawn_again(folder, output, monkeypatch, *options):
    """A record from its own numbers, in another folder. The test below keeps items, which takes minutes for these."""
    monkeypatch.setitem(record["main"].__globals__, "ITEMS", ())
    monkeypatch.setattr(sys, "argv", ["record.py", str(folder / "runs.csv"), *options, "--output", str(output)])
    record["main"]()
    for name in ("runs.csv", "tables.md", "main_results.csv", "claims.csv"):
        assert (output / name).read_text() == (folder / name).read_text(), name


@pytest.mark.parametrize(("folder", "drawn"), [("erasure/held_out", ["erasure_held_out"]), ("erasure/objectives", [])])
def test_a_picture_is_drawn_from_all_base_models_of_its_world(folder, drawn, tmp_path, monkeypatch):
    """The second record shares two base models with the world of the picture."""
    found, parts = [], record["main"].__globals__
    monkeypatch.setitem(parts, "ITEMS", ())
    monkeypatch.setitem(parts, "OUTPUT", tmp_path)
    monkeypatch.setitem(parts, "draw", lambda figures: found.extend(figures))
    output = tmp_path / folder
    monkeypatch.setattr(sys, "argv", ["record.py", str(RECORD / folder / "runs.csv"), "--output", str(output)])
    record["main"]()
    assert found == drawn
    assert (output / "tables.md").read_text() == (RECORD / folder / "tables.md").read_text()


def test_items_of_several_tables_are_kept_in_one_and_those_of_a_run_once(tmp_path):
    tables = [("new", [(0, "q", 1.0)]), ("old", [(0, "q", 0.0), (0, "r", 0.0), (1, "q", 1 / 3)])]
    for name, rows in tables:
        (tmp_path / name).mkdir()
        items = [("a", "b", "gd", "ptc", *row) for row in rows]
        pd.DataFrame(items, columns=[*KEYS, "id", "score"]).to_csv(tmp_path / name / "answers_w.csv", index=False)
    paths = [tmp_path / name / "runs_w.csv" for name, _ in tables]
    for name in record["ITEMS"]:
        record["keep_items"](paths, name, tmp_path)
    assert [file.name for file in tmp_path.glob("*.xz")] == ["answers.csv.xz"], "of what was kept beside them alone"
    kept = pd.read_csv(tmp_path / "answers.csv.xz")
    assert kept[["seed", "id", "score"]].values.tolist() == [[0, "q", 1.0], [1, "q", 0.333333]]
    record["keep_items"]([tmp_path / "runs.csv"], "answers", tmp_path / "again")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "again" / "answers.csv.xz"), kept)


def test_times_of_steps_that_have_not_run_again_are_kept(tmp_path):
    before, now = tmp_path / "record", tmp_path / "results"
    times = {"step": ["attack", "evaluate"], "jobs": [3, 3], "cpu_seconds": [5.0, 7.0], "longest": [6.0, 8.0]}
    before.mkdir()
    pd.DataFrame(times).to_csv(before / "step_times.csv", index=False)
    write_json(now / "x.provenance.json", {"step": "gripmoe.cli.evaluate:evaluate", "cpu_seconds": 2.0})
    output = tmp_path / "step_times.csv"
    record["keep_times"]([now / "runs_w.csv", before / "runs.csv"], output)
    assert pd.read_csv(output).values.tolist() == [["attack", 3, 5.0, 6.0], ["evaluate", 1, 2.0, 2.0]]
    record["keep_times"]([tmp_path / "nothing" / "runs.csv"], tmp_path / "none.csv")
    assert not (tmp_path / "none.csv").exists()


def test_the_main_tables_are_there_as_numbers():
    """Those that the drawn table shows, with their intervals and marks, and no other; base models are the units."""
    tidy = pd.read_csv(RECORD / "main_results.csv", keep_default_na=False, na_values={"half_width": ""})
    assert not tidy.duplicated(["model", "benchmark", "objective", "method", "metric"]).any()
    found = record["Record"]([RECORD / "runs.csv"])
    tables = [table for name in ("main_results", "muse_results") if (table := found.table(name))]
    measured = [cell for table in tables for _, cells, _ in table.rows for cell in cells if cell.value is not None]
    shown = sorted((cell.value, cell.half_width or 0.0) for cell in measured)
    assert len(shown) == len(tidy) > 100
    kept = sorted(zip(tidy["mean"], tidy.half_width.fillna(0.0), strict=True))
    assert [value for value, _ in kept] == pytest.approx([value for value, _ in shown], rel=1e-3, abs=1e-6)
    assert tidy.half_width.sum() == pytest.approx(sum(half for _, half in shown), rel=1e-3)
    one = tidy[(tidy.objective == "gd") & (tidy.metric == "retain_accuracy")].set_index("method").loc["anchored"]
    runs = found.runs
    alike = runs[(runs.objective == "gd") & (runs.method == "anchored") & (runs.metric == "retain_accuracy")]
    of_models = alike.groupby("model").value.mean()
    assert one.n == len(alike) and len(of_models) == 6
    assert one["mean"] == pytest.approx(of_models.mean(), rel=1e-3)
    assert one.half_width == pytest.approx(stats.t.ppf(0.975, 5) * of_models.sem(), rel=1e-3)


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_every_record_says_what_its_runs_were_computed_with(folder):
    cells = read_json(folder / "provenance.json")["runs"]
    assert cells["device"] and cells["packages"] and cells["code"]
    written = read_json(folder / "provenance.json")["written"]
    assert written["runs.csv"] == file_digest(folder / "runs.csv") and len(written["commit"]) == 40


def test_a_record_is_not_written_without_what_its_runs_were_computed_with(tmp_path):
    runs = tmp_path / "runs_w.csv"
    runs.write_text("model,benchmark,objective,method,seed,metric,value\nm,b,gd,ptc,0,retain_accuracy,0.5\n")
    with pytest.raises(ValueError, match="nothing beside .*runs_w.csv says what its runs were computed with"):
        record["provenance"]([runs], tmp_path)
    step = {"step": "evaluate", "code": "c0de", "device": "abacus", "python": "3.9", "packages": {"torch": "2.0"}}
    write_json(tmp_path / "m" / "b" / "gd" / "ptc" / "0" / "evaluation.provenance.json", step)
    (tmp_path / "record").mkdir()
    again = (tmp_path / "record" / "runs.csv").write_bytes(runs.read_bytes()) and tmp_path / "record" / "runs.csv"
    cells = record["provenance"]([runs], again.parent)["runs"]
    assert cells["device"] == ["abacus"] and cells["code"] == {"evaluate": {"c0de": 1}}
    write_json(again.with_name("provenance.json"), {"runs": cells})
    assert record["provenance"]([again], again.parent)["runs"] == cells, "drawn again from its own numbers"


def test_runs_that_are_added_to_a_record_replace_its_own(tmp_path):
    """Whole runs: a number that only the replaced run has is not kept."""
    rows = [
        ("a", "b", "gd", "ptc", seed, name, value)
        for seed, name, value in ((0, "x", 0.1), (0, "y", 0.2), (1, "x", 0.3))
    ]
    old = pd.DataFrame(rows, columns=[*KEYS, "metric", "value"])
    new = pd.DataFrame([("a", "b", "gd", "ptc", 0, "x", 0.9)], columns=old.columns)
    assert record["joined"]([new, old]).value.tolist() == [0.9, 0.3]
    parts = [
        {"device": ["abacus"], "python": ["3.9"], "packages": ["torch 2.0"], "code": {"evaluate": {"c0de": 2}}},
        {
            "device": ["abacus"],
            "python": ["3.8"],
            "packages": ["torch 2.1"],
            "code": {"evaluate": {"c0de": 1, "f00d": 4}},
        },
    ]
    paths = [tmp_path / name / "runs.csv" for name in ("new", "old")]
    for path, part, table in zip(paths, parts, (new, old), strict=True):
        write_json(path.with_name("provenance.json"), {"runs": part})
        path.write_text(table.to_csv(index=False))
    found = record["provenance"](paths, paths[0].parent)["runs"]
    assert found["python"] == ["3.8", "3.9"] and found["packages"] == ["torch 2.0", "torch 2.1"]
    assert found["device"] == ["abacus"] and found["code"] == {"evaluate": {"c0de": 3, "f00d": 4}}


def test_base_models_of_a_record_stay_beside_new_ones(tmp_path):
    write_json(tmp_path / "results" / "models" / "tiny_b" / "model.json", {"final_loss": 0.5, "weights": "a1"})
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "base_models.csv").write_text("model,final_loss,cpu_seconds\ntiny_b,0.9,3\ntiny_c,0.7,4\n")
    record["keep_models"]([tmp_path / "results" / "runs_w.csv", tmp_path / "record" / "runs.csv"], tmp_path / "out.csv")
    kept = pd.read_csv(tmp_path / "out.csv").set_index("model")
    assert kept.final_loss.to_dict() == {"tiny_b": 0.5, "tiny_c": 0.7} and kept.weights["tiny_b"] == "a1"


def test_runs_of_another_world_stay_out_of_a_table():
    found = record["Record"]([RECORD / "runs.csv"])
    main, erasure = found.of_table("main_results"), found.of_worlds("tiny_erasure")
    assert set(main.model) == {f"tiny_{letter}" for letter in "abcdef"} and erasure.empty
    other = record["Record"]([RECORD / "erasure" / "runs.csv"])
    assert not other.of_worlds("tiny_erasure").empty and other.of_table("main_results").empty


def test_what_several_tables_explain_is_said_once():
    one, other = Table(["FA"], legend=["FA: a", "RS: s"]), Table(["FA", "RA"], legend=["FA: a", "RA: b"])
    assert record["shared_legend"]([one, other]) == ["FA: a"]
    assert one.below == ["RS: s."] and other.below == ["RA: b."]


def test_what_was_not_measured_is_left_out():
    row, empty = [Cell("0.5", 0.5), Cell("–")], [Cell("–"), Cell("–")]
    of_gd = [("SEUF", row, []), ("Anchored (ours)", empty, []), ("Unconstrained", row, [])]
    blocks = [("", [("Before unlearning", row, [])]), ("GD", of_gd)]
    others = [("KL", [("SEUF", empty, []), ("Unconstrained", empty, [])]), ("NPO", [("SEUF", row, [])])]
    table = record["measured_only"](Table(["FA", "RA"], [], blocks + others, legend=["FA: a", "RA: b"]))
    assert table.columns == ["FA"] and table.legend == ["FA: a"]
    assert [(block, [label for label, _, _ in rows]) for block, rows in table.blocks] == [
        ("", ["Before unlearning"]),
        ("GD", ["SEUF", "Unconstrained"]),
    ]
    assert record["measured_only"](Table(["FA", "RA"], [], blocks[:1])) is None, "no unlearned model"
