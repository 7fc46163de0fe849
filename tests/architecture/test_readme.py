"""The README is short. tests/docs compares its numbers with the record and runs its code."""

from pathlib import Path

import pandas as pd

from gripmoe.reporting.names import method_label

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOUND = README.partition("## What we found")[2].partition("\n## ")[0]


def test_a_reader_is_through_in_minutes():
    assert len(README.splitlines()) <= 120


def test_all_methods_that_the_record_has_under_every_objective_are_in_the_table():
    runs = pd.read_csv(ROOT / "docs" / "record" / "runs.csv")
    shown = [line.strip("|").split("|")[0].strip() for line in FOUND.splitlines() if line.startswith("|")][2:]
    objectives = runs.groupby("method").objective.unique()
    measured = objectives.index[objectives.map(lambda of: set(of) in ({"none"}, {"gd", "kl", "npo", "rmu"}))]
    assert {method_label(name) for name in measured if name != "erase_words"} == set(shown)  # a control of the facts
