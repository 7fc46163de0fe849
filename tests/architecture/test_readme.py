"""The README is short, and its tables are whole. tests/docs compares its numbers with the record and runs its code."""

from pathlib import Path

import pandas as pd

from gripmoe.reporting.names import method_label

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOUND = README.partition("## What we found")[2].partition("\n## ")[0]


def test_a_reader_is_through_in_minutes():
    assert len(README.splitlines()) <= 120


def test_verdicts_are_those_of_the_record():
    claims = "routing_collapses", "a_stable", "a_above_frozen", "a_retains", "b_forgets", "forcing_recovers"
    table = FOUND[FOUND.index("| the paper says") :].partition("\n\n")[0]
    verdicts = pd.read_csv(ROOT / "docs" / "record" / "claims.csv").set_index("claim").verdict
    shown = [line.strip("| ").split("|")[-1].strip() for line in table.splitlines()][2:]
    assert shown == [verdicts[claim] for claim in claims]


def test_all_methods_that_the_record_has_under_every_objective_are_in_the_table():
    runs = pd.read_csv(ROOT / "docs" / "record" / "runs.csv")
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    table = page[page.index("| | FA") :].partition("\n\n")[0]
    shown = [line.strip("|").split("|")[0].strip() for line in table.splitlines()][2:]
    objectives = runs.groupby("method").objective.unique()
    measured = objectives.index[objectives.map(lambda of: set(of) in ({"none"}, {"gd", "kl", "npo", "rmu"}))]
    assert {method_label(name) for name in measured if name != "erase_words"} == set(shown)  # a control of the facts
