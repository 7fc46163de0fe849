"""`gripmoe manifest`: what artefacts are made of."""

from __future__ import annotations

from gripmoe.io.files import write_json
from gripmoe.reporting.manifest import manifest as manifest_of


def manifest(args) -> None:
    """What the tables and figures of a world were made of."""
    write_json(args.output, manifest_of(args.files, args.runs))
