"""The record: its tables are what its own numbers give, and hold what was measured."""

import runpy
import sys
from pathlib import Path

import pytest

from gripmoe.files import file_digest, read_json
from gripmoe.reporting.tables import Cell, Table

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "record"
record = runpy.run_path(str(ROOT / "workflow" / "record.py"))


def test_the_tables_are_what_the_numbers_give(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["record.py", str(RECORD / "runs.csv"), "--output", str(tmp_path)])
    record["main"]()
    for name in ("runs.csv", "tables.md"):
        assert (tmp_path / name).read_text() == (RECORD / name).read_text(), name
    written = read_json(tmp_path / "provenance.json")["written"]
    assert written["runs.csv"] == file_digest(RECORD / "runs.csv") and written["packages"]["pandas"]


@pytest.mark.parametrize("folder", [RECORD, RECORD / "other_cpu"], ids=lambda folder: folder.name)
def test_every_record_says_what_wrote_it(folder):
    written = read_json(folder / "provenance.json")["written"]
    assert written["runs.csv"] == file_digest(folder / "runs.csv") and len(written["commit"]) == 40


def test_cells_of_another_world_stay_out_of_a_table():
    found = record["Record"]([RECORD / "runs.csv"])
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
