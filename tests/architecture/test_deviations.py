"""docs/deviations.md: the table from paper to code names every place of the paper, and nothing that is not there."""

import ast
import re
from pathlib import Path

from gripmoe.config.methods import method_table
from gripmoe.io.files import read_yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gripmoe"
ARTEFACTS = read_yaml(ROOT / "workflow" / "config" / "artefacts.yaml")
PLACES = {
    *(f"Table {number}" for number in range(1, 11)),
    *("Fig. 1", "Fig. 2", "Alg. 1", "Alg. 2", "Thm. C.1"),
    *(f"Eq. {number}" for number in range(1, 20)),
    *("App. A", "App. A.1", "App. A.2", "App. A.3", "App. B.1", "App. B.2", "App. B.3"),
    *(f"App. {letter}.{number}" for letter, count in (("C", 5), ("D", 4), ("G", 4)) for number in range(1, count + 1)),
    *("App. E", "App. F"),
}


def rows():
    """Place and names of each row of the page's second part."""
    text = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8").split("## From the paper to the code")[1]
    lines = [line.strip().strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line] for line in lines[1:]]


def is_there(name):
    """A function or class of a file of the package, a method, a table or figure, or a file of the repository."""
    path, _, inside = name.partition(":")
    if not inside:
        return name in method_table() or name in ARTEFACTS or (ROOT / name).is_file()
    if not (PACKAGE / path).is_file():
        return False
    found = ast.parse((PACKAGE / path).read_text(encoding="utf-8")).body
    for part in inside.split("."):
        nodes = [node for node in found if getattr(node, "name", None) == part]
        if not nodes:
            return False
        found = getattr(nodes[0], "body", [])
    return True


def test_every_place_of_the_paper_has_a_row():
    """Each once; a row may name several."""
    places = [place.strip() for place, *_ in rows() for place in place.split(",")]
    assert sorted(places) == sorted(PLACES)


def test_every_name_is_there():
    for place, names in rows():
        found = re.findall(r"`([^`]+)`", names)
        assert found, place
        assert not [name for name in found if not is_there(name)], place


def test_what_is_not_there_is_refused():
    known = ["geometry/halfspace.py:nearest_feasible", "constraints/hooks.py:ConstraintHandle.retain", "ptc_paper"]
    assert all(map(is_there, [*known, "claims", "workflow/config/paper.yaml"]))
    gone = [
        "geometry/halfspace.py:nearest",
        "geometry/space.py:violation",
        "constraints/hooks.py:ConstraintHandle.keep",
    ]
    assert not any(map(is_there, [*gone, "ptc_letter", "claim", "workflow/config/papers.yaml"]))
