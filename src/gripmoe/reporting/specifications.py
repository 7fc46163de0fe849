"""The tables that comparisons.yaml describes, and the notebook and description of every table and figure.

The workflow imports this module, so it needs neither pandas nor matplotlib.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Literal

from gripmoe.config.reading import read_catalogue
from gripmoe.config.types import Name, Names, Strict
from gripmoe.io.errors import ConfigError

COMPARISON = "comparison"  # the notebook of every table of comparisons.yaml


class ListedRow(Strict):
    """A row of a block. It has the paper's values, if the paper prints some."""

    method: Name
    objective: Name | None = None
    model: Name | None = None
    label: str | None = None
    paper: list[int | float | None] | None = None
    line: int | str | None = None


class Block(Strict):
    rows: list[ListedRow]
    name: str | None = None
    objective: Name | None = None
    benchmark: Name | None = None


class Specification(Strict):
    """An entry of comparisons.yaml, which says what the keys mean."""

    heading: str
    about: str
    title: str
    paper: Names
    measured: Names
    blocks: list[Block]
    model: Name | None = None
    kind: Literal["letters", "news"] = "letters"
    note: str | None = None
    differences: bool = False
    all_methods: bool = False
    marks_best: bool = True


@functools.cache
def specifications() -> dict[str, dict]:
    """The entries of comparisons.yaml."""
    tables = read_catalogue(Path(__file__).with_name("comparisons.yaml"), Specification)
    return {name: table.model_dump(exclude_unset=True) for name, table in tables.items()}


def specification(name: str) -> dict:
    """The entry of a table in comparisons.yaml. Raises ValueError for an unknown name."""
    tables = specifications()
    if name not in tables:
        raise ValueError(f"comparisons.yaml: no table {name!r}; one of {', '.join(tables)}")
    return tables[name]


def about(name: str) -> str:
    """The text that introduces a table of comparisons.yaml, in Markdown. Raises ValueError for an unknown name."""
    return specification(name)["about"].replace("\n", "\n\n")


def notebook_of(name: str, folder: Path) -> Path:
    """The notebook that renders a table or figure: that of its name or, for a table of comparisons.yaml,
    comparison.ipynb. Raises ConfigError if there is neither."""
    own = folder / f"{name}.ipynb"
    if own.exists():
        return own
    if name in specifications():
        return folder / f"{COMPARISON}.ipynb"
    raise ConfigError(
        f"artefacts: {name!r} is no table of src/gripmoe/reporting/comparisons.yaml, and has no notebook {own}: add one"
        " of the two"
    )


def description(name: str, folder: Path) -> tuple[str, str]:
    """The heading of a table or figure and the text below it, in Markdown: those of its entry in comparisons.yaml, or
    of the first cell of its notebook in `folder`. Raises ConfigError if there is neither, or no such cell."""
    notebook = notebook_of(name, folder)
    if notebook.stem != name:
        return specification(name)["heading"], about(name)
    try:
        cell = "".join(json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{notebook}: no notebook whose first cell is text ({error!r}); copy one again") from error
    heading, _, text = cell.removeprefix("# ").partition("\n")
    return heading, text.strip()
