"""Runs with numbers made up for tests, and how to find a row of a table."""

from pathlib import Path

import pandas as pd

import gripmoe.reporting
from gripmoe.reporting.runs import COLUMNS

COMPARISONS = Path(gripmoe.reporting.__file__).with_name("comparisons.yaml")


def synthetic():
    """Two seeds of three methods; `frozen_router` has not reached its target in one of them."""
    rows = []
    values = {
        "unconstrained": (0.26, 0.70, 0.40),
        "frozen_router": (0.30, 0.99, 0.80),
        "expert_specific_paper": (0.25, 0.90, 0.75),
    }
    for method, (fa, ra, rs) in values.items():
        for seed in (0, 1):
            metrics = {
                "forget_accuracy": fa,
                "retain_accuracy": ra + 0.02 * seed,
                "routing_stability": rs,
                "recovery_rate": 0.1,
                "reached": float(not (method == "frozen_router" and seed == 1)),
                "diverged": 0.0,
                "forget_accuracy_target": 0.27,
                "corrected_after": 0.0,
                "num_experts": 16.0,
                "top_k": 4.0,
                **{f"routing_stability_layer_{layer}": rs - 0.1 * layer + 0.02 * seed for layer in range(3)},
            }
            rows += [("tiny_a", "wmdp_tiny", "rmu", method, seed, name, value) for name, value in metrics.items()]
    rows += [("tiny_a", "wmdp_tiny", "none", "original", 0, "forget_accuracy", 0.98)]
    return pd.DataFrame(rows, columns=COLUMNS)


def row(table, label):
    name, measured, paper = next(row for row in table.rows if row[0].startswith(label))
    return name, dict(zip(table.columns, measured, strict=True)), dict(zip(table.paper_columns, paper, strict=True))


def news(method, objective="gd", seed=0, **metrics):
    known = {"verbmem": 25.0, "knowmem_forget": 10.0, "privleak": -60.0, "knowmem_retain": 50.0, "corrected_after": 0.0}
    known |= {"routing_stability": 0.6, "reached": 1.0, "diverged": 0.0} | metrics
    known |= {"verbmem_target": 28.0, "knowmem_forget_target": 15.0}
    return [("tiny_news_a", "muse_tiny", objective, method, seed, name, value) for name, value in known.items()]
