"""`gripmoe verify`: the checksums of a manifest, computed again."""

from __future__ import annotations

import sys

from gripmoe.io.errors import ConfigError
from gripmoe.reporting.manifest import mismatches, other_versions


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
