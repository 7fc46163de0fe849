"""The numbers of README and documentation are those of the record, and one that is not is found."""

import re
import runpy
from pathlib import Path

import pytest

from gripmoe.config.project import Project
from gripmoe.io.files import read_yaml

ROOT = Path(__file__).parents[2]
script = runpy.run_path(str(ROOT / "workflow" / "quote.py"))
QUOTES = read_yaml(script["QUOTES"])
DECIMAL = re.compile(r"(?<![\d.])[01]\.\d\d(?!\d|\.\d)")


@pytest.mark.parametrize("page", QUOTES)
def test_numbers_are_the_records_and_wrong_ones_are_found(page, monkeypatch):
    """Every number that a quote enters is replaced by another one; the script makes the page again."""
    text, entries = (ROOT / page).read_text(encoding="utf-8"), QUOTES[page]
    wrong = text
    for table in entries.get("tables", []) + entries.get("models", []):
        before, heading, below = wrong.partition(table["heading"])
        cells, blank, after = below.partition("\n\n")
        wrong = before + heading + DECIMAL.sub("7.77", cells) + blank + after
    for sentence, sources in entries.get("sentences", {}).items():
        (found,) = script["pattern"](sentence).finditer(wrong)
        for group in range(len(sources), 0, -1):
            start, end = found.span(group)
            wrong = f"{wrong[:start]}77{wrong[end:]}"
    assert wrong != text
    monkeypatch.setitem(script["quoted"].__globals__, "ROOT", Folder(page, wrong))
    assert script["quoted"](page, entries) == text, "run workflow/quote.py"


class Folder:
    """A root in which one page reads otherwise."""

    def __init__(self, page, text):
        self.page, self.text = page, text

    def __truediv__(self, page):
        assert page == self.page
        return self

    def read_text(self, encoding):
        return self.text


@pytest.mark.parametrize("page, heading, allowed", [
    ("README.md", "What we found", ["0.25", "0.27", "0.05"]),  # a guess, the target, and a goal
    ("docs/findings.md", "Forget accuracy under attacks", ["0.27", "0.05"]),  # the target, and what exceeds it
    ("docs/findings.md", "What limits these results", ["0.95"]),  # the anchor's aim
    ("docs/record.md", "What the runs say", ["0.05", "0.95", "0.05", "0.05", "0.05"]),  # margins, the anchor's aim
])  # fmt: skip
def test_every_decimal_of_what_we_found_is_quoted(page, heading, allowed):
    """But for what the paper says."""
    found = (ROOT / page).read_text(encoding="utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    prose = "\n".join(line for line in found.splitlines() if not line.startswith("|"))
    for sentence in QUOTES[page]["sentences"]:
        prose = script["pattern"](sentence).sub("", prose)
    prose = re.sub(r"[Tt]he\s+paper('s| has)\s+[01]\.\d\d( (and|to) [01]\.\d\d)?", "", prose)
    assert DECIMAL.findall(prose) == allowed


def test_runs_are_counted():
    """Those that forgot and those that did not are all."""
    forgot, missed, runs = (
        int(script["value_of"](f"main rmu anchored {count}")) for count in ("forgot", "missed", "runs")
    )
    assert forgot > 0 < missed and forgot + missed == runs


def test_a_sentence_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="is there 0 times"):
        script["with_sentence"]("Nothing.", "It keeps {} of it.", ["main claims all"])
    with pytest.raises(ValueError, match="'expert_specific_single' was not measured under all objectives"):
        script["value_of"]("main all expert_specific_single forget_accuracy")
    with pytest.raises(ValueError, match="below '.*' the columns are"):
        (table,) = QUOTES["docs/findings.md"]["tables"]
        columns = dict(reversed(table["columns"].items()))
        script["with_table"](
            (ROOT / "docs" / "findings.md").read_text(encoding="utf-8"), **table | {"columns": columns}
        )
    with pytest.raises(ValueError, match="is no source"):
        script["value_of"]("somewhere")


def test_a_sentence_is_found_across_lines():
    page = "It keeps\n  3 of it, and 4."
    assert script["pattern"]("It keeps {} of it, and {}.").search(page).groups() == ("3", "4")


def test_the_settings_that_the_record_tells_are_those_of_its_world():
    page, project = (
        (ROOT / "docs" / "record_method.md").read_text(encoding="utf-8"),
        Project(ROOT / "workflow/config", "record_main"),
    )
    told = page.partition("| learning rate, α |")[2].partition("\n\n")[0].splitlines()
    objectives = [name.strip().lower() for name in told[0].strip(" |").split("|")]
    methods = {
        "unconstrained": ["unconstrained"],
        "frozen router": ["frozen_router"],
        "Method A, both forms": ["expert_specific", "expert_specific_paper"],
        "anchored": ["anchored"],
        "router L2, one expert": ["router_l2_single"],
    }
    assert objectives == ["gd", "kl", "npo", "rmu"] and len(told) == 2 + len(methods)
    for row in told[2:]:
        label, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for objective, cell in zip(objectives, cells, strict=True):
            for method in methods[label]:
                training = project.run("tiny_a", "wmdp_tiny", objective, method, 0).training
                told_of_run = [float(number) for number in cell.partition("(")[0].split(",")]
                assert told_of_run == [training.learning_rate, training.objective["alpha"]], (label, objective)
