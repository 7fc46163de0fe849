"""The results of a world as text for a terminal."""

from __future__ import annotations

import textwrap

import pandas as pd

from gripmoe.reporting.claims import DECIDED, all_verdicts, counted, load_claims, value_and_interval
from gripmoe.reporting.comparison import comparison
from gripmoe.reporting.runs import of_kind

SHOWN = ["FA", "RA", "RA 5-shot", "C1", "C2", "C4", "RS", "recovery"]  # columns of the main tables
WIDTH = 100


def main_table(runs: pd.DataFrame) -> str:
    """The first columns of the main table, without rows that were not measured. Of runs on news alone, of the table of
    MUSE."""
    letters = of_kind(runs, "letters")
    table = comparison(runs, "muse_results") if letters.empty else comparison(letters, "main_results")
    columns = [table.columns.index(name) for name in SHOWN if name in table.columns]
    rows = [
        [f"{block} {label}".strip(), *(measured[column].text for column in columns)]
        for block, entries in table.blocks
        for label, measured, _ in entries
        if any(cell.value is not None for cell in measured)
    ]
    texts = pd.DataFrame(rows, columns=[table.heading, *(table.columns[column] for column in columns)])
    return texts.to_string(index=False, formatters={table.heading: f"{{:<{texts.iloc[:, 0].str.len().max()}}}".format})


def decided_claims(runs: pd.DataFrame) -> str:
    """The decided claims with what was measured, and the number of undecided ones."""
    claims, named, lines = all_verdicts(runs), load_claims(), []
    for row in claims[claims.verdict.isin(DECIDED)].itertuples():
        lines += textwrap.wrap(f"{row.verdict}: {row.text}", WIDTH, subsequent_indent="  ")
        value, low, high = value_and_interval(row, named[row.claim])
        interval = f"{value} [{low}, {high}]"
        lines.append(f"  {row.comparison}: {interval}, {row.units} {row.unit}s")
    return "\n".join([*lines, counted(claims)])
