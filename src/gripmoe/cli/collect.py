"""`gripmoe collect`: tidy tables of all runs."""

from __future__ import annotations

from gripmoe.cli.common import beside
from gripmoe.config.provenance import recorded
from gripmoe.io.files import read_json, write_json
from gripmoe.reporting.collect import collect_cells, computed_with


def collect(args) -> None:
    """Tidy CSVs of all cells: a row per cell and metric, per cell and check, per cell and item that it was asked, per
    cell and item that attacks ask."""
    record = beside(args.output)
    with recorded(record, collect):
        collect_cells(args.cells, args.output, args.histories, args.answers, args.attacks)
    write_json(record, read_json(record) | {"cells": computed_with(args.cells)})  # what artefacts say of them
