"""The record: its tables are what its own numbers give, and hold what was measured."""

import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest

from gripmoe.io.files import file_digest, read_json, write_json
from gripmoe.reporting.tables import Cell, Table

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "record"
LONGEST = RECORD / "earlier"  # no items were kept of it: all that its tables show is in its numbers
RECORDS = [file.parent for file in RECORD.rglob("provenance.json")]
record = runpy.run_path(str(ROOT / "workflow" / "record.py"))


def test_the_tables_are_what_the_numbers_give(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["record.py", str(LONGEST / "runs.csv"), "--output", str(tmp_path)])
    record["main"]()
    for name in ("runs.csv", "tables.md", "main_results.csv"):
        assert (tmp_path / name).read_text() == (LONGEST / name).read_text(), name
    written = read_json(tmp_path / "provenance.json")["written"]
    assert written["runs.csv"] == file_digest(LONGEST / "runs.csv") and written["packages"]["pandas"]


def test_the_main_tables_are_there_as_numbers():
    """Those that the drawn table shows, with their intervals and marks, and no other."""
    tidy = pd.read_csv(LONGEST / "main_results.csv", keep_default_na=False, na_values={"half_width": ""})
    assert not tidy.duplicated(["model", "benchmark", "objective", "method", "metric"]).any()
    found = record["Record"]([LONGEST / "runs.csv"])
    for name, benchmark in (("main_results", "wmdp_tiny"), ("muse_results", "muse_tiny")):
        measured = [cell for _, cells, _ in found.table(name).rows for cell in cells if cell.value is not None]
        shown = sorted((cell.value, cell.half_width or 0.0) for cell in measured)
        numbers = tidy[tidy.benchmark == benchmark]
        assert len(shown) == len(numbers) > 100
        kept = sorted(zip(numbers["mean"], numbers.half_width.fillna(0.0), strict=True))
        assert [value for value, _ in kept] == pytest.approx([value for value, _ in shown], rel=1e-3)
        assert numbers.half_width.sum() == pytest.approx(sum(half for _, half in shown), rel=1e-3)
    one = tidy[(tidy.objective == "gd") & (tidy.metric == "retain_accuracy")].set_index(["benchmark", "method"])
    assert one.loc[("wmdp_tiny", "unconstrained"), "n"] == 4 and one.loc[("wmdp_tiny", "ptc"), "mark"] == "*‡"
    alone = one.loc[("wmdp_tiny", "routing_aware")]
    assert alone.n == 1 and pd.isna(alone.half_width)


# Written before runs kept what they were computed with, which is lost.
WITHOUT = "baa0a462cf4b7711f7396d137caa90c36244d83c25030c30d66e2635b68d081b"


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_every_record_says_what_its_runs_were_computed_with(folder):
    cells = read_json(folder / "provenance.json")["runs"]
    assert file_digest(folder / "runs.csv") == WITHOUT or cells["device"] and cells["packages"] and cells["code"]
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


def test_runs_of_another_world_stay_out_of_a_table():
    found = record["Record"]([LONGEST / "runs.csv"])
    main, twins = found.of_world("record"), found.of_world("tiny_dense")
    assert set(main.model) == {"tiny_a", "tiny_b"} and set(main.benchmark) == {"wmdp_tiny"}
    assert set(twins.model) == {"tiny_a", "tiny_dense"}
    alone = main[(main.objective == "kl") & (main.seed > 0)]
    assert alone.empty and not twins[(twins.objective == "kl") & (twins.seed > 0)].empty, "no other method to compare"
    assert len(found.table("main_results").blocks) == 5, "one block per objective, since all are of one kind"


def test_what_was_not_measured_is_left_out():
    row, empty = [Cell("0.5", 0.5), Cell("–")], [Cell("–"), Cell("–")]
    of_gd = [("SEUF", row, []), ("Anchored (ours)", empty, []), ("Unconstrained", row, [])]
    blocks = [("", [("Before unlearning", row, [])]), ("GD", of_gd)]
    others = [("KL", [("SEUF", empty, []), ("Unconstrained", empty, [])]), ("NPO", [("SEUF", row, [])])]
    table = record["measured_only"](Table(["FA", "RA"], [], blocks + others, ["FA: a; RA: b"]))
    assert table.columns == ["FA"] and table.notes == ["FA: a"]
    assert [(block, [label for label, _, _ in rows]) for block, rows in table.blocks] == [
        ("", ["Before unlearning"]),
        ("GD", ["SEUF", "Unconstrained"]),
    ]
    assert record["measured_only"](Table(["FA", "RA"], [], blocks[:1])) is None, "no unlearned model"
