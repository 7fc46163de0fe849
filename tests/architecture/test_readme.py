"""The README is short, its code runs as pasted, and its numbers are those of the record."""

import re
from pathlib import Path

import pandas as pd
import pytest

from gripmoe.reporting.collect import load_runs
from gripmoe.reporting.erasure import strongest_attacks
from gripmoe.reporting.names import method

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOUND = README.partition("## What we found")[2].partition("\n## ")[0]
METRICS = {
    "FA": "forget_accuracy",
    "RA": "retain_accuracy",
    "RS": "routing_stability",
    "original expert sets": "forced_forget_accuracy",
    "original routers": "restored_router_all",
    "one layer's experts": "restored_experts_worst_layer",
    "20 retain steps": "relearned_from_others_after_20",
}
RUNS = pd.read_csv(ROOT / "docs" / "record" / "newcomer" / "runs.csv")
MEANS = RUNS.groupby(["method", "metric"]).value.mean()


def table() -> dict[str, dict[str, str]]:
    heading, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in FOUND.splitlines() if line.startswith("|")
    ]
    return {row[0]: dict(zip(heading[1:], row[1:], strict=True)) for row in rows}


def test_a_reader_is_through_in_minutes():
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("label", table())
def test_the_table_is_the_records(label):
    of_label = {method(name).label: name for name in RUNS.method.unique()}
    expected = MEANS[of_label[label]]
    for heading, shown in table()[label].items():
        value = expected.get(METRICS[heading])
        assert shown == ("–" if value is None else f"{value:.2f}"), heading


def test_all_methods_of_the_record_are_in_the_table():
    assert {method(name).label for name in RUNS.method.unique()} == set(table())


def test_a_sentence_quotes_the_table_or_the_record():
    """Every number with two decimals below the table stands in it, in a claim and what decides it, or is an excess of
    the record on erasure."""
    claims = pd.read_csv(ROOT / "docs" / "record" / "newcomer" / "claims.csv")
    known = {cell for row in table().values() for cell in row.values()}
    known |= {f"{abs(value):.2f}" for column in ("difference", "low", "high") for value in claims[column].dropna()}
    known |= set(re.findall(r"\b\d\.\d\d\b", " ".join(claims.text)))
    erasure = load_runs(ROOT / "docs" / "record" / "erasure" / "runs.csv")
    excess = strongest_attacks(erasure).groupby(["objective", "method"]).excess.mean()
    known |= {f"{value:.2f}" for value in excess}
    prose = "\n".join(line for line in FOUND.splitlines() if not line.startswith("|"))
    quoted = set(re.findall(r"\b\d\.\d\d\b", prose))
    assert quoted and quoted <= known, quoted - known


def test_the_claims_are_counted():
    verdicts = pd.read_csv(ROOT / "docs" / "record" / "newcomer" / "claims.csv").verdict.value_counts()
    counts = (verdicts.sum(), verdicts["holds"], verdicts["does not hold"])
    assert "Of {} statements, most of them the paper's, {} hold, {} do not".format(*counts) in FOUND


def test_the_code_runs_as_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
