"""What every table and figure was made of, and whether it still is."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from PIL import Image

from gripmoe.config.fingerprint import code_fingerprint, fingerprint_now
from gripmoe.config.provenance import package_versions
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest, read_json
from gripmoe.reporting import RENDERING
from gripmoe.reporting.collect import KEYS, load_runs

PACKAGES = ("gripmoe", "matplotlib", "pandas", "scipy", "papermill", "snakemake")  # that draw
MEASURED = ("evaluation.json", "attack.json", "history.json", "questions.csv", "attack_questions.csv")


def manifest(files: Sequence[Path], runs: Path) -> dict:
    """Checksums of `files` (artefacts, notebooks, the tables they come from) and of `runs`; what each artefact was made
    of, with which parameters and packages; and the cells behind them: checksums of what was measured, and the
    provenance that each step wrote (code, packages, device)."""
    cells = load_runs(runs, kind=None)[KEYS].drop_duplicates()
    digests = {_relative(file): file_digest(file) for file in (*sorted(files), runs)}
    return {
        "code": code_fingerprint(*RENDERING),
        "python": platform.python_version(),
        "packages": package_versions(PACKAGES),
        "files": digests,
        "artefacts": _artefacts(list(digests), _relative(runs)),
        "results": str(runs.parent),
        "seeds": sorted({int(seed) for seed in cells.seed}),
        "cells": {"/".join(map(str, cell)): _provenance(runs.parent, cell) for cell in cells.itertuples(index=False)},
    }


def _artefacts(files: Sequence[str], runs: str) -> dict[str, dict]:
    """By name: the notebook that makes an artefact, the tables that it says it was made of, its parameters, and its
    files."""
    made = {}
    for notebook in [file for file in files if file.endswith(".ipynb")]:
        name = Path(notebook).stem
        outputs = [file for file in files if Path(file).stem == name and file != notebook]
        parameters = {"runs": runs, "output": next((file for file in outputs if file.endswith(".csv")), None)}
        made[name] = {
            "notebook": notebook,
            "inputs": _inputs(outputs, Path(runs).parent),
            "parameters": parameters,
            "files": outputs,
        }
    return made


def _inputs(outputs: Sequence[str], folder: Path) -> list[str]:
    """The tables of runs in `folder` that a figure's metadata names, or a table's first line in LaTeX."""
    source = ""
    for file in map(Path, outputs):
        if file.suffix == ".png":
            with Image.open(file) as opened:
                source = opened.info.get("Source", "")
        elif file.suffix == ".tex":
            source = file.read_text(encoding="utf-8").partition("\n")[0]
    return [str(folder / name) for name in re.findall(r"(\S+) sha256 ", source)]


def _relative(file: Path) -> str:
    return os.path.relpath(file)


def _provenance(results: Path, cell: pd.Series) -> dict:
    folder = results.joinpath(*map(str, cell))
    steps = {file.name.removesuffix(".provenance.json"): read_json(file) for file in folder.glob("*.provenance.json")}
    weights = folder / "checkpoint.json"
    kept = ("step", "code", "packages", "device", "python")
    return {
        "steps": {name: {key: record.get(key) for key in kept} for name, record in sorted(steps.items())},
        "weights": read_json(weights)["weights"] if weights.exists() else None,
        "measured": {name: file_digest(folder / name) for name in MEASURED if (folder / name).exists()},
        "settings": file_digest(settings) if (settings := folder / "run.yaml").exists() else None,
    }


def _written(path: Path) -> dict:
    """A manifest. Raises ConfigError if the file is another one."""
    written = read_json(path)
    for key, kind in (("files", dict), ("code", str), ("cells", dict), ("results", str)):
        if not (isinstance(written, dict) and isinstance(written.get(key), kind)):
            what = "a mapping" if kind is dict else "text"
            remedy = "give the manifest.json that the workflow has written, or run the workflow again"
            raise ConfigError(f"{path}: no manifest, `{key}` must be {what}; {remedy}")
    return written


def mismatches(path: Path) -> list[str]:
    """What a manifest says and the files no longer do, one line each. Raises ConfigError if the file is no manifest."""
    written = _written(path)
    faults = []
    for name, digest in written["files"].items():
        if not Path(name).exists():
            faults.append(f"{name}: missing")
        elif file_digest(Path(name)) != digest:
            faults.append(f"{name}: changed since the manifest was written")
    if code_fingerprint(*RENDERING) != written["code"]:
        faults.append("the code that draws and judges has changed")
    stale: dict[str, list[str]] = {}
    for cell, record in written["cells"].items():
        for step in record["steps"].values():
            if step.get("step") and fingerprint_now(step["step"]) != step["code"]:
                stale.setdefault(step["step"], []).append(cell)
        for name, digest in record.get("measured", {}).items():
            measured = Path(written["results"], cell, name)
            if not (measured.exists() and file_digest(measured) == digest):
                faults.append(f"{measured}: changed since the manifest was written")
        weights = Path(written["results"], cell, "checkpoint.json")
        if record.get("weights") and not (weights.exists() and read_json(weights)["weights"] == record["weights"]):
            faults.append(f"{weights}: other weights than those of the manifest")
        settings = Path(written["results"], cell, "run.yaml")
        if record["settings"] and not (settings.exists() and file_digest(settings) == record["settings"]):
            faults.append(f"{settings}: changed since the manifest was written")
    for step, cells in stale.items():
        change = "its code has changed" if fingerprint_now(step) else "it is gone or has another name"
        faults.append(f"{step}: {change} since it ran for {_listed(cells)}")
    return faults


def other_versions(path: Path) -> list[str]:
    """Versions of Python and packages that a manifest names and that are others here, one line each: of what drew, and
    of what each step ran with. Results may well be the same. Raises ConfigError if the file is no manifest."""
    written = _written(path)
    records = [("drawn", written)] + [
        (name, step) for cell in written["cells"].values() for name, step in cell["steps"].items()
    ]
    found = []
    for made, record in records:
        named = {"python": record.get("python"), **(record.get("packages") or {})}
        here = {"python": platform.python_version(), **package_versions([name for name in named if name != "python"])}
        found += [
            f"{made}: {n} was {version}, here {here[n]}"
            for n, version in named.items()
            if version and here[n] != version
        ]
    return list(dict.fromkeys(found))


def _listed(cells: Sequence[str]) -> str:
    return ", ".join(cells[:3]) + (f" and {len(cells) - 3} others" if len(cells) > 3 else "")
