"""The table of runs and those beside it: their columns, how they are read, and which rows may be pooled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gripmoe.config.world import RunKey
from gripmoe.io.errors import ConfigError
from gripmoe.reporting import names

KEYS = list(RunKey._fields)
COLUMNS = [*KEYS, "metric", "value"]
HISTORY_COLUMNS = [*KEYS, "step", "metric", "value"]
# Names as plain objects: the strings that pandas would choose take a third more time in small tables.
DTYPES = dict.fromkeys(["model", "benchmark", "objective", "method", "metric"], object) | {"value": float}
NAMES_OF_ITEMS = {*KEYS, "id", "fact", "metric"} - {"seed"}  # columns of text, also where it is a number or "NA"


def by_run(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per run, with KEYS as its index, and a column per metric."""
    return runs.pivot_table(index=KEYS, columns="metric", values="value")


def values_of(runs: pd.DataFrame, metric: str) -> pd.Series:
    """The values of one metric, with KEYS as their index. Runs in which it is NaN are left out."""
    return runs[(runs.metric == metric) & runs.value.notna()].set_index(KEYS).value


def apart(table: pd.DataFrame, by: Sequence[str] = ("model", "benchmark")) -> list[tuple[str, pd.DataFrame]]:
    """Named groups of rows that may be pooled: those of base models with one label in names.yaml on benchmarks with one
    label (`by` names other columns). A single group has an empty name. Benchmarks with the same label are kept apart if
    a base model ran several of them: then they differ in settings, not only in facts."""
    labels = {"model": names.model_label, "benchmark": names.benchmark_label, "objective": names.objective_label}
    shown = {
        column: table[column].map({value: labels[column](value) for value in table[column].unique()}) for column in by
    }
    if "benchmark" in shown:
        label, pair = shown["benchmark"], table[["model", "benchmark"]]
        several = (
            pair.assign(label=label).drop_duplicates().loc[lambda pairs: pairs.duplicated(["model", "label"]), "label"]
        )
        shown["benchmark"] = label.where(~label.isin(several), table.benchmark)
    differ = [column for column, labelled in shown.items() if labelled.nunique() > 1]
    if not differ:
        return [("", table)]
    first, *others = (shown[column] for column in differ)
    return list(table.groupby(first.str.cat(others, sep=", "), sort=False))


def of_kind(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows of benchmarks that ask letter questions ("letters") or about news ("news"), whose numbers do not mix."""
    news = set(table.loc[table.metric == "verbmem", "benchmark"])
    return table[table.benchmark.isin(news) == (kind == "news")]


def beside(runs: Path, name: str) -> Path:
    """The table of that name ("histories", "answers", "attacks") that belongs to the table of `runs`. A record keeps it
    compressed."""
    plain = runs.with_name(name + runs.name.removeprefix("runs"))
    compressed = plain.with_name(f"{plain.name}.xz")
    return compressed if compressed.exists() else plain


def _read(path: Path, **options) -> pd.DataFrame:
    try:
        return pd.read_csv(path, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no table of runs can be read ({error}); collect the runs again") from error


def read_items(path: Path) -> pd.DataFrame:
    """A table with a row per run and item."""
    columns = set(_read(path, nrows=0).columns)
    missing = dict.fromkeys(columns - NAMES_OF_ITEMS, ["", "nan"])
    return _read(path, dtype=dict.fromkeys(columns & NAMES_OF_ITEMS, object), keep_default_na=False, na_values=missing)


def load_histories(runs: Path, kind: str = "letters") -> pd.DataFrame:
    """The table of checks that belongs to the table of `runs`, of one kind of benchmark."""
    return of_kind(_read(beside(runs, "histories"), dtype=DTYPES), kind)


def load_answers(runs: Path, kind: str | None = "letters") -> pd.DataFrame:
    """The table of answers that belongs to the table of `runs`, of one kind of benchmark or (None) of all: a row per
    run and item."""
    answers = read_items(beside(runs, "answers"))
    return of_kind(answers, kind) if kind else answers


def load_attacks(runs: Path) -> pd.DataFrame:
    """The table of attacked items that belongs to the table of `runs`: a row per run and item, a column per attack."""
    return read_items(beside(runs, "attacks"))


def load_runs(path: Path, kind: str | None = "letters") -> pd.DataFrame:
    """The tidy table, of one kind of benchmark or (None) of all. Raises ConfigError if it cannot be read or lacks a
    column."""
    runs = _read(path, dtype=DTYPES, keep_default_na=False, na_values={"value": ["nan"]})
    missing = [column for column in COLUMNS if column not in runs.columns]
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(missing)}; collect the runs again")
    return of_kind(runs, kind) if kind else runs
