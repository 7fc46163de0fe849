"""What a table or figure was made of, as its file says."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.provenance import package_versions
from gripmoe.io.files import file_digest, read_json
from gripmoe.reporting import RENDERING


def made_of(tables: Sequence[Path]) -> str:
    """One line that says what an artefact was made of: its tables with checksums and seeds; the devices and packages
    that computed the runs (`gripmoe collect` has stored them beside the table of runs); the code and packages that drew
    it."""
    parts = [f"{table.name} sha256 {file_digest(table)}" for table in tables]
    seeds = {seed for table in tables for seed in pd.read_csv(table, usecols=["seed"]).seed}
    parts += [f"seeds {' '.join(map(str, sorted(seeds)))}"] if seeds else []
    notes = {table.with_name(re.sub("^[a-z]+_", "runs_", table.stem) + ".provenance.json") for table in tables}
    for note in sorted(file for file in notes if file.exists()):
        computed = read_json(note).get("runs", {})
        parts += [f"computed with {key} {', '.join(found)}" for key, found in computed.items() if found]
    drawn = [f"{name} {version}" for name, version in package_versions(("matplotlib", "pandas", "scipy")).items()]
    parts.append(f"gripmoe code {code_fingerprint(*RENDERING)}, python {platform.python_version()}, {', '.join(drawn)}")
    return "; ".join(parts)
