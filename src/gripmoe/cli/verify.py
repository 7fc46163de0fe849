"""`gripmoe verify`: recompute the checksums of a manifest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from gripmoe.cli.options import read_file
from gripmoe.io.errors import ConfigError
from gripmoe.reporting.manifest import mismatches, other_versions


def verify(*, manifest: Annotated[Path, read_file("--manifest", "manifest.json, beside the figures.")]) -> None:
    """Recompute the checksums of a manifest.

    The command also names the packages whose versions differ on this machine.

    \b
    Example:
      gripmoe verify --manifest paper_figures/tiny/manifest.json
    """
    for remark in other_versions(manifest):
        print(remark, file=sys.stderr)
    if faults := mismatches(manifest):
        for fault in faults:
            print(fault, file=sys.stderr)
        raise ConfigError(f"{manifest}: {len(faults)} mismatches; run the workflow again")
    print(f"{manifest}: all files are as they were written")
