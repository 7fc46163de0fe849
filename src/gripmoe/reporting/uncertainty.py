"""Means over runs and their intervals. The base model is the random unit, and the objective is a fixed effect: runs of
one base model share what it has learned, so that more seeds of it say little about other base models."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

LEAST = 3  # values that an interval needs, and base models from which they are the unit


def interval(values: pd.Series) -> tuple[float, float | None]:
    """Mean and half-width of a 95 % interval: Student's t from three values on. Two values give half their range, since
    their t-interval is wider than any measure here; one value gives none."""
    values = values.dropna()
    mean, half_width = float(values.mean()), None
    if len(values) == 2:
        half_width = float(values.max() - values.min()) / 2
    elif len(values) >= LEAST:
        half_width = float(stats.t.ppf(0.975, len(values) - 1) * values.sem())
    return mean, half_width


def units(values: pd.Series) -> pd.Series:
    """One value per base model where at least three were measured, else the values of the runs. The index of `values`
    has the levels `model` and `objective`. A base model's value is the mean over objectives of its means over seeds.
    Where base models lack different objectives, an additive model of both supplies the missing means."""
    values = values.dropna()
    if values.index.unique("model").size < LEAST:
        return values
    cells = values.groupby(level=["model", "objective"]).mean().unstack("objective")
    present = cells.notna().to_numpy()
    if not present.all():
        rows, columns = (np.indices(cells.shape)[axis].ravel() for axis in (0, 1))
        design = np.hstack([np.eye(len(cells))[rows], np.eye(cells.shape[1])[columns]])
        measured = present.ravel()
        effects = np.linalg.lstsq(design[measured], cells.to_numpy().ravel()[measured], rcond=None)[0]
        cells = cells.where(present, (design @ effects).reshape(cells.shape))
    return cells.mean(axis=1)


def of_runs(runs: pd.DataFrame) -> pd.Series:
    """The units of a tidy table's values: rows of one metric."""
    return units(runs.set_index(["model", "objective"]).value)


def p_above(values: pd.Series, limit: float) -> float:
    """Twice the one-sided p of the hypothesis that the mean is `limit` or less: below 0.05 exactly where the 95 %
    t-interval lies above the limit."""
    error = max(float(values.sem()), 1e-12)
    return min(1.0, 2 * float(stats.t.sf((values.mean() - limit) / error, len(values) - 1)))


def holm(p_values: pd.Series, alpha: float = 0.05) -> pd.Series:
    """By hypothesis the level that its p is compared with, so that one false verdict or more in the family has a
    probability of at most `alpha` (Holm 1979). After the first p above its level, the level stays."""
    ordered, level, levels = p_values.sort_values(), alpha, {}
    stopped = False
    for rank, (name, p) in enumerate(ordered.items()):
        level = level if stopped else alpha / (len(ordered) - rank)
        stopped = stopped or p > level
        levels[name] = level
    return pd.Series(levels, dtype=float)
