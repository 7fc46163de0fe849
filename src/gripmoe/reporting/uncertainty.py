"""Means over runs and their intervals. The base model is the random unit, and the objective is a fixed effect: runs of
one base model share what it has learned, so that more seeds of it say little about other base models."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

LEAST = 3  # values that an interval needs


def interval(values: pd.Series) -> tuple[float, float | None]:
    """Mean and half-width of a 95 % interval: Student's t from three values on. Two values give half their range, since
    their t-interval is wider than any measure here; one value gives none."""
    values = values.dropna()
    if len(values) >= LEAST:
        return float(values.mean()), student(values)
    return float(values.mean()), float(values.max() - values.min()) / 2 if len(values) == 2 else None


def student(values: pd.Series, level: float = 0.95) -> float:
    """Half-width of Student's interval of the mean."""
    return float(stats.t.ppf((1 + level) / 2, len(values) - 1) * values.sem())


def units(values: pd.Series) -> pd.Series:
    """One value per base model: the mean over objectives of its means over seeds. The values of a single base model
    stay as they are: its runs are the units, and what they show is about this base model alone.

    The index of `values` has the levels `model` and `objective`. Base models are compared under the same objectives: of
    those that were measured on most base models, and without base models that lack one of them."""
    values = values.dropna()
    if values.index.unique("model").size <= 1:
        return values
    cells = values.groupby(level=["model", "objective"]).mean().unstack("objective")
    measured = cells.notna().sum()
    compared = cells.loc[:, measured == measured.max()].dropna()
    if compared.empty:  # no base model has all of these objectives: the first of them remains
        compared = cells[[measured.idxmax()]].dropna()
    return compared.mean(axis=1)


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
    ordered = p_values.sort_values()
    levels = pd.Series(alpha / np.arange(len(ordered), 0, -1), ordered.index)
    return levels.clip(upper=levels[ordered > levels].min())
