"""Tidy tables of all cells."""

from __future__ import annotations

from gripmoe.commands import beside
from gripmoe.provenance import recorded
from gripmoe.reporting.collect import collect_cells


def collect(args) -> None:
    """Tidy CSVs of all cells: a row per (model, benchmark, objective, method, seed, metric), and one per check."""
    with recorded(beside(args.output), "gripmoe.reporting.collect"):
        collect_cells(args.cells, args.output, args.histories)
