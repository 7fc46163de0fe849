"""All cells in one tidy table: a row per cell and metric."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gripmoe.files import atomic_path, read_json, read_yaml

KEYS = ["model", "benchmark", "objective", "method", "seed"]
COLUMNS = [*KEYS, "metric", "value"]


def collect_cells(folders: Sequence[Path], output: Path) -> None:
    """Reads what each cell folder holds and writes `output`. Numbers only: the status of a run becomes `reached` and
    `diverged`, and truths are 0 or 1."""
    with atomic_path(output) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for folder in folders:
            run = read_yaml(folder / "run.yaml")
            key = [run["model"], run["benchmark_name"], run["objective"], run["method_name"], run["seed"]]
            metrics = _metrics(folder)
            metrics["forget_target"] = run["benchmark"]["target"]["forget_accuracy"]
            metrics["corrected_after"] = run["method"]["corrects"] is not None
            for metric, value in sorted(metrics.items()):
                writer.writerow([*key, metric, float(value)])


def _metrics(folder: Path) -> dict[str, float]:
    # Forget accuracy stands in both files; the attack's own count comes from the same questions and model.
    metrics = {**read_json(folder / "attack.json"), **read_json(folder / "evaluation.json")}
    checkpoint = folder / "checkpoint.json"
    if checkpoint.exists():
        outcome = read_json(checkpoint)
        metrics |= {
            "steps": outcome["steps"],
            "reached": int(outcome["status"] == "reached"),
            "diverged": int(outcome["status"] == "diverged"),
        }
        metrics |= {name: value for name, value in outcome.items() if isinstance(value, (bool, int, float))}
    return metrics


def load_runs(path: Path) -> pd.DataFrame:
    """The tidy table. Raises ValueError if a column is missing."""
    runs = pd.read_csv(path, dtype={"value": float}, keep_default_na=False, na_values={"value": ["nan"]})
    missing = [column for column in COLUMNS if column not in runs.columns]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}")
    return runs
