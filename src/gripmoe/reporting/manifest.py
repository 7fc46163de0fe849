"""The manifest: what every table and figure was made of, and whether the files have changed since."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from gripmoe.config.fingerprint import code_fingerprint, fingerprint_now
from gripmoe.config.provenance import package_versions
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest, read_json
from gripmoe.reporting import RENDERING
from gripmoe.reporting.runs import KEYS, load_runs
from gripmoe.reporting.specifications import COMPARISON, specifications

PACKAGES = ("gripmoe", "matplotlib", "pandas", "scipy", "papermill", "snakemake")  # that make artefacts
MEASURED = ("evaluation.json", "attack.json", "history.json", "questions.csv", "attack_questions.csv")


def manifest(files: Sequence[Path], runs: Path) -> dict:
    """The manifest: checksums of `files` (artefacts, notebooks and their tables) and of `runs`; the packages; the
    notebook and inputs of each artefact; and for the runs, checksums of their results and the provenance of each step
    (code, packages, device)."""
    keys = load_runs(runs, kind=None)[KEYS].drop_duplicates()
    digests = {os.path.relpath(file): file_digest(file) for file in (*sorted(files), runs)}
    return {
        "code": code_fingerprint(*RENDERING),
        "python": platform.python_version(),
        "packages": package_versions(PACKAGES),
        "files": digests,
        "artefacts": _artefacts(list(digests), os.path.relpath(runs)),
        "results": str(runs.parent),
        "seeds": sorted({int(seed) for seed in keys.seed}),
        "runs": {
            "/".join(key): _provenance(runs.parent.joinpath(*key)) for key in keys.astype(str).itertuples(index=False)
        },
    }


def _artefacts(files: Sequence[str], runs: str) -> dict[str, dict]:
    """By name of an artefact: its notebook, the tables that its metadata name, and its files."""
    notebooks = {Path(file).stem: file for file in files if file.endswith(".ipynb")}
    if COMPARISON in notebooks:
        notebooks = dict.fromkeys(specifications(), notebooks.pop(COMPARISON)) | notebooks
    made = {}
    for name, notebook in notebooks.items():
        outputs = [file for file in files if Path(file).stem == name and file != notebook]
        if outputs:
            made[name] = {"notebook": notebook, "inputs": _inputs(outputs, Path(runs).parent), "files": outputs}
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


def _provenance(folder: Path) -> dict:
    steps = {file.name.removesuffix(".provenance.json"): read_json(file) for file in folder.glob("*.provenance.json")}
    kept = ("step", "code", "packages", "device", "python")
    return {
        "steps": {name: {key: record.get(key) for key in kept} for name, record in sorted(steps.items())},
        "weights": _weights(folder),
        "measured": {name: file_digest(folder / name) for name in MEASURED if (folder / name).exists()},
        "settings": _digest(folder / "run.yaml"),
    }


def _digest(file: Path) -> str | None:
    return file_digest(file) if file.exists() else None


def _weights(folder: Path) -> str | None:
    checkpoint = folder / "checkpoint.json"
    return read_json(checkpoint)["weights"] if checkpoint.exists() else None


def _written(path: Path) -> dict:
    """Reads a manifest. Raises ConfigError if the file is no manifest."""
    written = read_json(path)
    remedy = "give the manifest.json that the workflow has written, or run the workflow again"
    for key, kind in (("files", dict), ("code", str), ("runs", dict), ("results", str)):
        if not (isinstance(written, dict) and isinstance(written.get(key), kind)):
            what = "a mapping" if kind is dict else "text"
            raise ConfigError(f"{path}: no manifest, `{key}` must be {what}; {remedy}")
    for run, record in written["runs"].items():
        steps = record.get("steps") if isinstance(record, dict) else None
        if not isinstance(steps, dict) or any(not isinstance(step, dict) for step in steps.values()):
            raise ConfigError(f"{path}: no manifest, `runs`: the `steps` of {run!r} must be mappings; {remedy}")
    return written


def mismatches(path: Path) -> list[str]:
    """The differences between a manifest and the files, one line each. Raises ConfigError if the file is no
    manifest."""
    written, changed = _written(path), "changed since the manifest was written"
    faults = []
    for name, digest in written["files"].items():
        if _digest(Path(name)) != digest:
            faults.append(f"{name}: {changed if Path(name).exists() else 'missing'}")
    if code_fingerprint(*RENDERING) != written["code"]:
        faults.append("the code that draws and judges has changed")
    stale: dict[str, list[str]] = {}
    for run, record in written["runs"].items():
        folder = Path(written["results"], run)
        for step in record["steps"].values():
            if step.get("step") and fingerprint_now(step["step"]) != step.get("code"):
                stale.setdefault(step["step"], []).append(run)
        digests = record.get("measured", {}) | ({"run.yaml": record["settings"]} if record.get("settings") else {})
        faults += [
            f"{folder / name}: {changed}" for name, digest in digests.items() if _digest(folder / name) != digest
        ]
        if record.get("weights") not in (None, _weights(folder)):
            faults.append(f"{folder / 'checkpoint.json'}: other weights than those of the manifest")
    for step, runs in stale.items():
        change = "its code has changed" if fingerprint_now(step) else "it is gone or has another name"
        others = f" and {len(runs) - 3} others" if len(runs) > 3 else ""
        faults.append(f"{step}: {change} since it ran for {', '.join(runs[:3])}{others}")
    return faults


def other_versions(path: Path) -> list[str]:
    """Versions of Python and packages that differ from a manifest, one line each: for the artefacts, and for each step.
    Results may still be equal. Raises ConfigError if the file is no manifest."""
    written = _written(path)
    records = [("drawn", written), *(step for run in written["runs"].values() for step in run["steps"].items())]
    found = []
    for made, record in records:
        named = {"python": record.get("python"), **(record.get("packages") or {})}
        here = {**package_versions([name for name in named if name != "python"]), "python": platform.python_version()}
        found += [f"{made}: {n} was {was}, here {here[n]}" for n, was in named.items() if was and here[n] != was]
    return list(dict.fromkeys(found))
