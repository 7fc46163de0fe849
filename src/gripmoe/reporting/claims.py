"""Statements decided by measurement: holds, does not hold, undecided, not measured."""

from __future__ import annotations

from importlib import resources

import pandas as pd
import yaml
from scipy import stats

from gripmoe.config.grid import NO_OBJECTIVE
from gripmoe.reporting import names
from gripmoe.reporting.collect import SHARED, of_kind
from gripmoe.reporting.comparison import collapsed, unforgotten
from gripmoe.reporting.tables import Cell, Table

RUN = ["model", "benchmark", "objective", "seed"]
ORIGINALS = ("original", "retrained")
COLOURS = {"holds": "#0072b2", "does not hold": "#d55e00", "undecided": "#000000", "not measured": "#7f7f7f"}
VERDICTS = tuple(COLOURS)


def load_claims() -> dict[str, dict]:
    text = (resources.files("gripmoe.reporting") / "claims.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def differences(runs: pd.DataFrame, claim: dict) -> pd.Series:
    """Left minus right of every run that has both: paired by base model, benchmark, objective and seed (with itself, if
    two metrics of one method are compared), or with the original or retrained model of the same base model and benchmark. Runs
    that have not forgotten, or not after their correction, are left out, unless the statement is about those too
    (`unreached`), and so are runs that have lost everything, whose answers look as if nothing could be recovered;
    unless it is about what is retained, where the loss speaks for itself. What an attack takes away counts as nothing
    recovered: answers below chance are no resistance."""
    runs = of_kind(runs, claim.get("kind", "letters"))
    if not claim.get("unreached"):
        runs = _without(runs, unforgotten(runs))
    if claim["metric"].removesuffix("_share") not in SHARED:
        runs = _without(runs, collapsed(runs))
    if "objectives" in claim:
        runs = runs[runs.objective.isin([*claim["objectives"], NO_OBJECTIVE])]
    runs = runs[runs.value.notna()]
    if "recovery" in claim["metric"]:
        runs = runs.assign(value=runs.value.clip(lower=0))
    left = runs[(runs.metric == claim["metric"]) & (runs.method == claim["left"])].set_index(RUN).value
    if not isinstance(claim["right"], str):
        return left - claim["right"]
    right = runs[(runs.metric == claim.get("right_metric", claim["metric"])) & (runs.method == claim["right"])]
    if claim["right"] in ORIGINALS:  # one for all objectives and seeds
        of_model = right.set_index(["model", "benchmark"]).value
        baseline = left.index.droplevel(["objective", "seed"]).map(of_model)
        return (left - pd.Series(baseline, index=left.index, dtype=float)).dropna()
    return (left - right.set_index(RUN).value).dropna()


def _without(runs: pd.DataFrame, left_out: pd.DataFrame) -> pd.DataFrame:
    keys = [*RUN, "method"]
    return runs[~runs.set_index(keys).index.isin(left_out.set_index(keys).index)]


def judge(pairs: pd.Series, claim: dict, level: float = 0.95) -> tuple[str, float, float, float]:
    """Verdict, mean difference and its t-interval over runs. A statement holds if the whole interval is on its side of
    the margin, does not hold if none of it is; with fewer than three runs it is undecided."""
    if pairs.empty:
        return "not measured", float("nan"), float("nan"), float("nan")
    mean = float(pairs.mean())
    if len(pairs) < 3:
        return "undecided", mean, float(pairs.min()), float(pairs.max())
    half = float(stats.t.ppf((1 + level) / 2, len(pairs) - 1) * pairs.sem())
    low, high, margin = mean - half, mean + half, claim.get("margin", 0.0)
    if claim["relation"] == "~":
        inside, outside = -margin <= low and high <= margin, high < -margin or low > margin
    elif claim["relation"] == ">":
        inside, outside = low > margin, high <= margin
    else:
        inside, outside = high < -margin, low >= -margin
    return ("holds" if inside else "does not hold" if outside else "undecided"), mean, low, high


def judge_each(pairs: pd.Series, claim: dict) -> tuple[str, float, float, float]:
    """Base models of different kinds, and benchmarks, are judged apart, and so are objectives if the statement is about
    each: it holds if it does for all, and does not if it does not for one. The difference and its interval are those of
    all together."""
    together = judge(pairs, claim)
    if pairs.empty:
        return together
    of = [pairs.index.get_level_values("model").map(names.model_label), pairs.index.get_level_values("benchmark")]
    of += [pairs.index.get_level_values("objective")] if claim.get("each_objective") else []
    verdicts = {judge(part, claim)[0] for _, part in pairs.groupby(of)}
    worst = next(verdict for verdict in ("does not hold", "undecided", "holds") if verdict in verdicts)
    return worst, *together[1:]


def judged(runs: pd.DataFrame) -> pd.DataFrame:
    """All statements with their verdicts, one row each."""
    rows = []
    for name, claim in load_claims().items():
        pairs = differences(runs, claim)
        verdict, mean, low, high = judge_each(pairs, claim)
        rows.append(
            {
                "claim": name,
                "text": claim["text"],
                "line": claim["line"],
                "comparison": _formula(claim),
                "runs": len(pairs),
                "objectives": " ".join(sorted(pairs.index.unique("objective"))) if len(pairs) else "",
                "difference": mean,
                "low": low,
                "high": high,
                "verdict": verdict,
            }
        )
    return pd.DataFrame(rows)


def _formula(claim: dict) -> str:
    """What is compared, as "RS: expert_specific > frozen_router + 0.13"."""
    right = claim["right"] if isinstance(claim["right"], str) else f"{claim['right']:g}"
    if "right_metric" in claim:
        right += f" ({names.metric_label(claim['right_metric'])})"
    if "margin" in claim:
        right += f" {({'>': '+', '<': '-', '~': '±'})[claim['relation']]} {claim['margin']:g}"
    return f"{names.metric_label(claim['metric'])}: {claim['left']} {claim['relation']} {right}"


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0: no negative zero


def claims_table(runs: pd.DataFrame) -> Table:
    """The verdicts as a table of one page: the paper's statements, then ours."""
    verdicts = judged(runs)
    headings = ["line", "difference", "interval", "runs", "verdict"]
    table = Table(headings, [], heading="Statement", data=verdicts)
    for name, rows in (
        ("The paper's statements", verdicts[verdicts.line != "ours"]),
        ("Ours", verdicts[verdicts.line == "ours"]),
    ):
        entries = []
        for row in rows.itertuples():
            missing = row.verdict == "not measured"
            cells = [
                Cell(str(row.line)),
                Cell("–") if missing else Cell(_signed(row.difference), row.difference),
                Cell("–") if missing else Cell(f"{_signed(row.low)} .. {_signed(row.high)}", row.high - row.low),
                Cell(str(row.runs), row.runs),
                Cell(row.verdict, best=row.verdict == "holds", colour=COLOURS[row.verdict]),
            ]
            entries.append((row.text, cells, []))
        table.blocks.append((name, entries))
    counts = verdicts.verdict.value_counts()
    intervals = (verdicts.runs > 2).sum()
    table.notes = [
        "line: of the paper's source; what each statement compares stands in the CSV. Differences paired by base model,"
        " objective and seed, of runs that forgot and (but for what is retained) kept more than chance; 95 % t-interval"
        " over runs, of all objectives together, their range below three. Kinds of base models are judged apart: a"
        " statement holds if it does for each. One that sets a method above another asks for a third of the paper's"
        " difference (ours: .05, or 5 points). Seeds of one base model are not independent of each other, and the"
        f" {intervals} intervals are not corrected for their number; where each objective has one run, they are those"
        " between objectives.",
        "; ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in VERDICTS) + ".",
    ]
    return table
