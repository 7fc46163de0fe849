"""Sets the numbers of README and documentation to those of the record, or tells which differ.

    python workflow/quote.py [--check]

docs/quotes.yaml names each sentence and table with numbers and where its numbers come from.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from shared import ROOT, under_every_objective
from transformers import AutoConfig

from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.io.files import read_yaml, write_text
from gripmoe.reporting import names
from gripmoe.reporting.claims import DECIDED, load_claims, value_and_interval
from gripmoe.reporting.erasure import depth_scores
from gripmoe.reporting.erasure_goals import goals
from gripmoe.reporting.runs import KEYS, load_histories, load_runs, of_kind
from gripmoe.reporting.tables import MISSING, fixed
from gripmoe.reporting.uncertainty import units_of_table

RECORD = ROOT / "docs" / "record"
QUOTES = ROOT / "docs" / "quotes.yaml"
SLOT, NUMBER = "{}", r"[-+]?\d+(?:\.\d+)?"
BASE_MODEL = ROOT / "src" / "gripmoe" / "worlds" / "shipped" / "tiny_a"
COUNTS = ("runs", "forgot", "missed")
OF_HUNDRED = ("verbmem", "knowmem_forget", "knowmem_retain", "privleak")


@functools.cache
def runs_of(record: str) -> pd.DataFrame:
    return load_runs(folder_of(record) / "runs.csv", kind=None)


@functools.cache
def goals_of(record: str) -> pd.DataFrame:
    return goals(of_kind(runs_of(record), "letters"))


@functools.cache
def claims_of(record: str) -> pd.DataFrame:
    return pd.read_csv(folder_of(record) / "claims.csv").set_index("claim")


def folder_of(record: str) -> Path:
    """Of the record of six base models, or of one beside it."""
    return RECORD if record == "main" else RECORD / record


def mean_of(record: str, objective: str, method: str, metric: str) -> float:
    """Mean over base models, or over the runs of a single one; of the original and retrained models too. With "all",
    the mean over objectives; with "news_all" or "news_gd", of MUSE. The metric "runs" is their number, "forgot" and
    "missed" the numbers of those that reached their forget target and that did not. Raises ValueError for "all" of a
    method that was not measured under each."""
    runs = of_kind(runs_of(record), "news" if objective.startswith("news_") else "letters")
    objective = NO_OBJECTIVE if method in names.NOT_UNLEARNED else objective.removeprefix("news_")
    of_objective = (runs.objective == objective) | (objective == "all")
    of_method = runs[of_objective & (runs.method == method)]
    if objective == "all" and len(of_method) and {*of_method.objective} != {*names.objectives_of(runs)}:
        raise ValueError(f"{QUOTES.name}: {method!r} was not measured under all objectives of {record!r}; name one")
    if metric == "runs":
        return len(of_method[KEYS].drop_duplicates())
    if metric in ("forgot", "missed"):
        return int((of_method[of_method.metric == "reached"].value == (metric == "forgot")).sum())
    return float(units_of_table(of_method[of_method.metric == metric]).mean())


def least_of(record: str, metric: str) -> float:
    """The least mean of a method that was measured under all objectives."""
    runs = under_every_objective(of_kind(runs_of(record), "letters"))
    methods = runs[runs.objective != NO_OBJECTIVE].method.unique()
    return min(mean_of(record, "all", method, metric) for method in methods)


def goal_of(record: str, objective: str, method: str, column: str) -> float:
    """A number of the table of `goals`."""
    found = goals_of(record)
    chosen = found[(found.objective == objective) & (found.method == method)]
    if chosen.empty or column not in chosen or chosen[column].isna().any():
        raise ValueError(f"{QUOTES.name}: the goals of {record!r} have no {column!r} of {method!r} under {objective!r}")
    return float(chosen[column].iloc[0])


def longer_of(record: str, method: str, metric: str) -> float:
    """Mean excess of `longer_relearning.csv`."""
    found = pd.read_csv(folder_of(record) / "longer_relearning.csv")
    wide = found[found.metric == metric].pivot(index="model", columns="method", values="value")
    return float((wide[method] - wide.retrained).mean())


def gradients_of(record: str, objective: str) -> float:
    """Norm of the gradient of all routers as a multiple of that of all experts, the mean over the unconstrained runs.
    Histories have root mean squares."""
    metrics = ("router_gradient", "expert_gradient")
    rms = load_histories(folder_of(record) / "runs.csv")
    rms = rms[(rms.objective == objective) & (rms.method == "unconstrained") & rms.metric.isin(metrics)]
    wide = rms.pivot_table(index=[*KEYS, "step"], columns="metric", values="value")
    ratio = units_of_table((wide.router_gradient / wide.expert_gradient).rename("value").reset_index()).mean()
    width = AutoConfig.from_pretrained(BASE_MODEL).moe_intermediate_size  # of an expert, which has three matrices
    return float(ratio / (3 * width) ** 0.5)


def depth_of(objective: str, method: str) -> float:
    depths = depth_scores(pd.read_csv(folder_of("erasure") / "readable_depth.csv"))
    chosen = depths[(depths.objective == objective) & (depths.method == method)]
    return float(units_of_table(chosen.rename(columns={"depth": "value"})).mean())


def count_of(record: str, which: str, verdict: str) -> int:
    """How many statements have a verdict, or are there (`all`), or decided (`decided`); how many of these also after
    Holm's correction (`corrected`), with fact sets as units (`of_fact_sets`), from runs under GD alone (`of_gd`)."""
    claims = claims_of(record)
    if which == "primary":
        claims = claims[claims.primary]
    elif which == "paper":
        claims = claims[claims.line != "ours"]
    decided = claims.verdict.isin(DECIDED)
    chosen = {
        "all": claims.verdict.notna(),
        "decided": decided,
        "corrected": decided & claims.survives_holm,
        "of_fact_sets": decided & (claims.verdict == claims.fact_set_verdict),
        "of_gd": decided & claims.by_objective.str.fullmatch(r"GD [^,]+") & claims.of.isna(),
    }
    return int(chosen.get(verdict, claims.verdict == verdict.replace("_", " ")).sum())


def value_of(source: str) -> str:
    """The number that a source names, as text. Raises ValueError for an unknown source."""
    match source.split():
        case ["erasure", "depth", objective, method]:
            return fixed(depth_of(objective, method), 2)
        case [record, "claims" | "primary" | "paper" as which, verdict]:
            return str(count_of(record, which, verdict))
        case [record, "claim" | "both" as kind, claim, "difference" | "low" | "high" as column]:
            row = claims_of(record).loc[claim]
            row = row.filter(like="both_").rename(lambda name: name.removeprefix("both_")) if kind == "both" else row
            values = value_and_interval(row, load_claims()[claim])
            return dict(zip(("difference", "low", "high"), values, strict=True))[column].lstrip("+")
        case [record, "claim", claim, objective]:
            by_objective = dict(part.split() for part in claims_of(record).by_objective[claim].split(", "))
            return by_objective[objective.upper()]
        case [record, "goals", objective, method, column]:
            decimals = 3 if column == "excess_p" or "_bound" in column else 2
            return fixed(goal_of(record, objective, method, column), decimals)
        case [record, "gradients", objective]:
            return fixed(gradients_of(record, objective), 2)
        case [record, "longer", method, metric]:
            return fixed(longer_of(record, method, metric), 2)
        case [record, "all", "least", metric]:
            return fixed(least_of(record, metric), 2)
        case [record, objective, method, metric] if not pd.isna(mean := mean_of(record, objective, method, metric)):
            return fixed(mean, 0 if metric.removeprefix("forced_") in (*OF_HUNDRED, *COUNTS) else 2)
    raise ValueError(f"{QUOTES.name}: {source!r} is no source, or the record has no number of it")


def pattern(text: str) -> re.Pattern:
    """A sentence with its numbers open, wherever its lines break."""
    parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in text.split(SLOT)]
    return re.compile(f"({NUMBER})".join(parts))


def with_sentence(page: str, text: str, sources: list[str]) -> str:
    """The page with the numbers of a sentence. Raises ValueError unless the sentence is there exactly once."""
    found = list(pattern(text).finditer(page))
    if len(found) != 1 or found[0].re.groups != len(sources):
        raise ValueError(f"{QUOTES.name}: {text!r} is there {len(found)} times, with {len(sources)} sources")
    for group in range(len(sources), 0, -1):
        start, end = found[0].span(group)
        page = page[:start] + value_of(sources[group - 1]) + page[end:]
    return page


def with_rows(page: str, heading: str, columns: dict[str, str], row_of: Callable[[str], list[str]]) -> str:
    """The page with the cells of the table below a heading line; `row_of` gives those beside the first one's text.
    Raises ValueError if the page names other `columns`."""
    start = page.index(heading)
    end = page.index("\n\n", start)
    names_of_columns, rule, *rows = page[start:end].splitlines()
    named = [cell.strip() for cell in names_of_columns.strip("|").split("|")][1:]
    if named != list(columns):
        raise ValueError(f"{QUOTES.name}: below {heading!r} the columns are {named}, not {list(columns)}")
    firsts = [row.strip("|").split("|")[0].strip() for row in rows]
    rows = [f"| {' | '.join([first, *row_of(first)])} |" for first in firsts]
    return page[:start] + "\n".join([names_of_columns, rule, *rows]) + page[end:]


def with_table(page: str, heading: str, record: str, objective: str, columns: dict[str, str]) -> str:
    """The page with the cells of a table of methods, each named by its label."""
    labels = {names.method_label(name): name for name in runs_of(record).method.unique()}

    def row_of(label: str) -> list[str]:
        if label not in labels:
            raise ValueError(f"{QUOTES.name}: the record has no method {label!r}, which a table names")
        cells = [mean_of(record, objective, labels[label], metric) for metric in columns.values()]
        return [MISSING if pd.isna(cell) else fixed(cell, 2) for cell in cells]

    return with_rows(page, heading, columns, row_of)


def with_models(page: str, heading: str, record: str, columns: dict[str, str]) -> str:
    """The page with the cells of a table of models, each named as code. A column has one score, two with a comma
    between them, or `retrained` and a score: that of the model's retrained one."""
    scores = pd.read_csv(folder_of(record) / "base_models.csv").set_index("model")

    def cell_of(model: str, measures: str) -> str:
        row = f"{model}_retrained" if measures.startswith("retrained ") else model
        asked = measures.removeprefix("retrained ").split(", ")
        whole = {name for name in asked if name in (*OF_HUNDRED, "cpu_seconds")}
        values = {name: scores[name].get(row) for name in asked}
        known = [MISSING if pd.isna(v) else fixed(v, 0 if name in whole else 2) for name, v in values.items()]
        return ", ".join(dict.fromkeys(known) if MISSING in known else known)

    def row_of(model: str) -> list[str]:
        return [cell_of(model.strip("`"), measures) for measures in columns.values()]

    return with_rows(page, heading, columns, row_of)


def quoted(name: str, entries: dict) -> str:
    """A page with the numbers of the record."""
    page = (ROOT / name).read_text(encoding="utf-8")
    for table in entries.get("tables", []):
        page = with_table(page, **table)
    for table in entries.get("models", []):
        page = with_models(page, **table)
    for text, sources in entries.get("sentences", {}).items():
        page = with_sentence(page, text, sources)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page differs")
    args = parser.parse_args()
    pages = {name: quoted(name, entries) for name, entries in read_yaml(QUOTES).items()}
    differ = [name for name, page in pages.items() if page != (ROOT / name).read_text(encoding="utf-8")]
    for name in differ:
        print(f"{name}: numbers differ from the record")
        if not args.check:
            write_text(ROOT / name, pages[name])
    raise SystemExit(bool(differ) and args.check)


if __name__ == "__main__":
    main()
