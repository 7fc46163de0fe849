"""Tidy tables of all cells."""

from __future__ import annotations

import sys

from gripmoe.commands import beside
from gripmoe.errors import ConfigError
from gripmoe.files import read_json, write_json
from gripmoe.provenance import recorded
from gripmoe.reporting.collect import collect_cells, computed_with
from gripmoe.reporting.manifest import manifest as manifest_of
from gripmoe.reporting.manifest import mismatches, other_versions


def collect(args) -> None:
    """Tidy CSVs of all cells: a row per cell and metric, per cell and check, per cell and item that it was asked, per
    cell and item that attacks ask."""
    record = beside(args.output)
    with recorded(record, collect):
        collect_cells(args.cells, args.output, args.histories, args.answers, args.attacks)
    write_json(record, read_json(record) | {"cells": computed_with(args.cells)})  # what artefacts say of them


def manifest(args) -> None:
    """What the tables and figures of a world were made of."""
    write_json(args.output, manifest_of(args.files, args.runs))


def verify(args) -> None:
    """Recomputes the checksums of a manifest, and says which versions are others here. Raises ConfigError if a checksum
    does not match."""
    for remark in other_versions(args.manifest):
        print(remark, file=sys.stderr)
    if faults := mismatches(args.manifest):
        for fault in faults:
            print(fault, file=sys.stderr)
        raise ConfigError(f"{args.manifest}: {len(faults)} mismatches; run the workflow again")
    print(f"{args.manifest}: all files are as they were written")
