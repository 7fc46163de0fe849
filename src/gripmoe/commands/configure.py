"""The resolved configuration of a cell; imports nothing heavy, since it runs once for every cell."""

from __future__ import annotations

from gripmoe.config import Run
from gripmoe.files import write_yaml
from gripmoe.parsing import parse_settings


def configure(args) -> None:
    """Writes the completely resolved configuration of one cell."""
    write_yaml(args.output, parse_settings(Run, args.settings).model_dump(mode="json"))
