"""The resolved configuration of a cell; imports nothing heavy, since it runs once for every cell."""

from __future__ import annotations

from gripmoe.config.reading import parse_settings
from gripmoe.config.world import Run
from gripmoe.io.files import write_yaml


def configure(args) -> None:
    """Writes the completely resolved configuration of one cell."""
    write_yaml(args.output, parse_settings(Run, args.settings).model_dump(mode="json"))
