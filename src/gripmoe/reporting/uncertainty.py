"""Means over runs and their intervals. The base model is the random unit, and the objective is a fixed effect. Runs of
one base model share what it has learned, so more seeds of it say little about other base models."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from statistics import fmean

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit  # scipy.stats takes a second to import

LEAST = 3  # the fewest values for an interval


def interval(values: pd.Series) -> tuple[float, float | None]:
    """Mean and half-width of a 95 % interval: Student's t for three or more values. Two values give half of their
    range, because their t-interval is wider than the range of any measure here. One value gives no interval."""
    values = values.dropna()
    if len(values) >= LEAST:
        return float(values.mean()), student(values)
    return float(values.mean()), float(values.max() - values.min()) / 2 if len(values) == 2 else None


def student(values: pd.Series, level: float = 0.95) -> float:
    """Half-width of Student's interval of the mean, of the values that are known."""
    values = values.dropna()
    return t_quantile((1 + level) / 2, len(values) - 1) * float(values.sem())


def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """The value below which Student's t lies with that probability."""
    return float(stdtrit(degrees_of_freedom, probability))


def complete_cells(values: pd.Series) -> pd.Series:
    """Leaves out base models or objectives until every base model has every objective. It keeps the choice with the
    most means, and prefers one with at least LEAST base models. The index of `values` has the levels `model` and
    `objective`."""
    values = values.dropna()
    cells = list(zip(*_models_and_objectives(values), strict=True))
    kept = _complete(set(cells))
    return values[[cell in kept for cell in cells]]


def units(values: pd.Series) -> pd.Series:
    """One value per base model: the mean over objectives of its means over seeds, of the values that `complete_cells`
    keeps. The values of a single base model are returned unchanged: then its runs are the units, and results are about
    this base model alone."""
    values = values.dropna()
    models, objectives = _models_and_objectives(values)
    return _of_models(models, objectives, values) if len(set(models)) > 1 else values


def units_of_table(runs: pd.DataFrame) -> pd.Series:
    """`units` of a tidy table with the rows of one metric. Those of a single base model keep the index of the table."""
    runs = runs[runs.value.notna()]
    models = runs.model.tolist()
    return _of_models(models, runs.objective, runs.value) if len(set(models)) > 1 else runs.value


def _models_and_objectives(values: pd.Series) -> list[list]:
    return [values.index.get_level_values(name).tolist() for name in ("model", "objective")]


def _complete(cells: set[tuple]) -> set[tuple]:
    """The largest choice of cells (base model, objective) in which every base model has every objective."""
    models, objectives = (sorted(set(column)) for column in zip(*cells, strict=True)) if cells else ([], [])
    if len(cells) == len(models) * len(objectives):
        return cells
    subsets = [subset for n in range(1, len(objectives) + 1) for subset in combinations(objectives, n)]
    choices = [([m for m in models if cells.issuperset(product([m], subset))], subset) for subset in subsets]
    return set(product(*max(choices, key=lambda kept: (len(kept[0]) >= LEAST, len(kept[0]) * len(kept[1])))))


def _of_models(models: Iterable, objectives: Iterable, values: Iterable[float]) -> pd.Series:
    """`units` of several base models. In plain Python: a frame for each cell of a table takes longer."""
    cells: dict[tuple, list[float]] = {}
    for model, objective, value in zip(models, objectives, values, strict=True):
        cells.setdefault((model, objective), []).append(value)
    means: dict[str, list[float]] = {}
    for cell in sorted(_complete(set(cells))):
        means.setdefault(cell[0], []).append(fmean(cells[cell]))
    return pd.Series({model: fmean(each) for model, each in means.items()}, dtype=float).rename_axis("model")


def p_above(values: pd.Series, limit: float) -> float:
    """Twice the one-sided p of the hypothesis that the mean is at most `limit`. It is below 0.05 exactly if the 95 %
    t-interval lies above the limit."""
    return min(1.0, 2 * one_sided_p(values, limit))


def one_sided_p(values: pd.Series, limit: float) -> float:
    """The p of the hypothesis that the mean is at most `limit`, from the values that are known."""
    values = values.dropna()
    error = max(float(values.sem()), 1e-12)
    return float(stdtr(len(values) - 1, (limit - values.mean()) / error))


def misses(gap: float, deviation: float, n: int, alpha: float) -> float:
    """The probability that Student's interval of n values, at level 1 - alpha, contains a limit that is `gap` from the
    mean."""
    distance = gap * n**0.5 / np.maximum(deviation, 1e-12) - t_quantile(1 - alpha / 2, n - 1)
    return float(stdtr(n - 1, -distance))


def holm(p_values: pd.Series, alpha: float = 0.05) -> pd.Series:
    """By hypothesis, the level to compare its p with, so that the probability of any false verdict in the family is at
    most `alpha` (Holm 1979). After the first p above its level, the level stays."""
    ordered = p_values.sort_values()
    levels = pd.Series(alpha / np.arange(len(ordered), 0, -1), ordered.index)
    return levels.clip(upper=levels[ordered > levels].min())
