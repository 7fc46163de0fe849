"""Statements decided by measurement: holds, does not hold, undecided, not measured."""

from __future__ import annotations

from math import nan
from pathlib import Path

import pandas as pd
from scipy import stats

from gripmoe.config.grid import NO_OBJECTIVE
from gripmoe.io.files import read_yaml
from gripmoe.reporting import names
from gripmoe.reporting.collect import KEYS, SHARED, of_kind
from gripmoe.reporting.comparison import collapsed, unforgotten
from gripmoe.reporting.tables import MISSING, Cell, Table, fixed, interval

RUN = ["model", "benchmark", "objective", "seed"]
RETAINED = (*SHARED, "retain_accuracy_five_shot")
COLOURS = {"holds": "#0072b2", "does not hold": "#d55e00", "undecided": "#000000", "not measured": "#7f7f7f"}
VERDICTS = tuple(COLOURS)
MOST_RUNS = 100  # a number of runs above it is not told


def load_claims() -> dict[str, dict]:
    return read_yaml(Path(__file__).with_name("claims.yaml"))


def differences(runs: pd.DataFrame, claim: dict) -> pd.Series:
    """Left minus right of every run that has both, indexed by RUN. The two sides are paired by base model, benchmark,
    objective and seed; with the original or the retrained model by base model and benchmark.

    Runs that have not forgotten, also those whose correction undid it, are left out, unless the claim is about them too
    (`unreached`). So are collapsed runs, from which nothing can be recovered, unless the claim is about what is
    retained. A negative recovery counts as none: answers below chance are no resistance."""
    runs = of_kind(runs, claim.get("kind", "letters"))
    left_out = [] if claim.get("unreached") else [unforgotten(runs)]
    left_out += [collapsed(runs)] if claim["metric"].removesuffix("_share") not in RETAINED else []
    for out in left_out:
        runs = runs[~runs.set_index(KEYS).index.isin(out.set_index(KEYS).index)]
    if "objectives" in claim:
        runs = runs[runs.objective.isin([*claim["objectives"], NO_OBJECTIVE])]
    runs = runs[runs.value.notna()]
    if "recovery" in claim["metric"]:
        runs = runs.assign(value=runs.value.clip(lower=0))
    left = runs[(runs.metric == claim["metric"]) & (runs.method == claim["left"])].set_index(RUN).value
    if not isinstance(claim["right"], str):
        return left - claim["right"]
    right = runs[(runs.metric == claim.get("right_metric", claim["metric"])) & (runs.method == claim["right"])]
    if claim["right"] in names.ORIGINALS:  # one for all objectives and seeds
        of_model = right.set_index(["model", "benchmark"]).value
        baseline = left.index.droplevel(["objective", "seed"]).map(of_model)
        return (left - pd.Series(baseline, index=left.index, dtype=float)).dropna()
    return (left - right.set_index(RUN).value).dropna()


def judge(pairs: pd.Series, claim: dict) -> tuple[str, float, float, float]:
    """Verdict, mean difference and its 95 % t-interval over runs. A claim holds if the whole interval is on its side of
    the margin, and does not hold if none of the interval is. With fewer than three runs the claim is undecided."""
    if pairs.empty:
        return "not measured", nan, nan, nan
    mean, half = interval(pairs)
    if len(pairs) < 3:
        return "undecided", mean, float(pairs.min()), float(pairs.max())
    low, high, margin = mean - half, mean + half, claim.get("margin", 0.0)
    if claim["relation"] == "~":
        inside, outside = -margin <= low and high <= margin, high < -margin or low > margin
    elif claim["relation"] == ">":
        inside, outside = low > margin, high <= margin
    else:
        inside, outside = high < -margin, low >= -margin
    return ("holds" if inside else "does not hold" if outside else "undecided"), mean, low, high


def runs_to_decide(pairs: pd.Series, claim: dict) -> int | None:
    """How many runs would decide an undecided claim if further runs were as these: the fewest whose t-interval of the
    same mean and standard deviation misses the margin. None without a spread to go by, or above MOST_RUNS."""
    mean, deviation = pairs.mean(), pairs.std()
    margin = claim.get("margin", 0.0)
    limits = {"~": (-margin, margin), ">": (margin,), "<": (-margin,)}[claim["relation"]]
    gap = min(abs(mean - limit) for limit in limits)
    enough = (n for n in range(len(pairs) + 1, MOST_RUNS + 1) if stats.t.ppf(0.975, n - 1) * deviation < gap * n**0.5)
    return next(enough, None) if len(pairs) > 1 else None


def _to_decide(runs: pd.DataFrame, pairs: pd.Series, claim: dict, verdict: str) -> str:
    """What would decide a claim that is not."""
    if verdict == "not measured":
        measured = set(runs.method[runs.metric == claim["metric"]])
        missing = [side for side in (claim["left"], claim["right"]) if isinstance(side, str) and side not in measured]
        return f"runs of {' and '.join(missing)}" if missing else "runs that have forgotten"
    if verdict != "undecided":
        return ""
    if needed := runs_to_decide(pairs, claim):
        return f"about {needed} runs"
    return "three runs or more" if len(pairs) < 3 else f"> {MOST_RUNS} runs"


def judge_each(pairs: pd.Series, claim: dict) -> tuple[str, float, float, float]:
    """As `judge`, but kinds of base models and benchmarks are judged apart, and with `each_objective` also objectives.
    A claim holds if it holds for all of them, and does not hold if it does not for one. The difference and its interval
    are those of all runs together."""
    together = judge(pairs, claim)
    if pairs.empty:
        return together
    of = [pairs.index.get_level_values("model").map(names.model_label), pairs.index.get_level_values("benchmark")]
    of += [pairs.index.get_level_values("objective")] if claim.get("each_objective") else []
    verdicts = {judge(part, claim)[0] for _, part in pairs.groupby(of)}
    worst = next(verdict for verdict in ("does not hold", "undecided", "holds") if verdict in verdicts)
    return worst, *together[1:]


def judged(runs: pd.DataFrame) -> pd.DataFrame:
    """All claims with their verdicts, one row each."""
    rows = []
    for name, claim in load_claims().items():
        pairs = differences(runs, claim)
        verdict, mean, low, high = judge_each(pairs, claim)
        row = {"claim": name, "text": claim["text"], "line": claim["line"], "comparison": _formula(claim)}
        row |= {"runs": len(pairs), "objectives": " ".join(sorted(pairs.index.unique("objective")))}
        row |= {"difference": mean, "low": low, "high": high, "verdict": verdict}
        rows.append(row | {"to_decide": _to_decide(runs, pairs, claim, verdict)})
    return pd.DataFrame(rows)


def _formula(claim: dict) -> str:
    """What is compared, as "RS: expert_specific > frozen_router + 0.13"."""
    right = claim["right"] if isinstance(claim["right"], str) else f"{claim['right']:g}"
    if "right_metric" in claim:
        right += f" ({names.metric(claim['right_metric']).heading})"
    if "margin" in claim:
        right += f" {({'>': '+', '<': '-', '~': '±'})[claim['relation']]} {claim['margin']:g}"
    return f"{names.metric(claim['metric']).heading}: {claim['left']} {claim['relation']} {right}"


def _signed(value: float) -> str:
    text = fixed(value, 2)
    return text if text.startswith("-") else f"+{text}"


def claims_table(runs: pd.DataFrame) -> Table:
    """The verdicts as a table of one page: the paper's claims, then ours."""
    verdicts = judged(runs)
    columns = ["line", "difference", "interval", "runs", "verdict", "to decide"]
    table = Table(columns, heading="Statement", data=verdicts)
    ours = verdicts.line == "ours"
    for name, group in (("The paper's statements", verdicts[~ours]), ("Ours", verdicts[ours])):
        entries = []
        for row in group.itertuples():
            difference, spread = Cell(MISSING), Cell(MISSING)
            if row.verdict != "not measured":
                difference = Cell(_signed(row.difference), row.difference)
                spread = Cell(f"{_signed(row.low)} .. {_signed(row.high)}", row.high - row.low)
            verdict = Cell(row.verdict, best=row.verdict == "holds", colour=COLOURS[row.verdict])
            shown = [Cell(str(row.line)), difference, spread, Cell(str(row.runs), row.runs), verdict]
            entries.append((row.text, [*shown, Cell(row.to_decide)], []))
        table.blocks.append((name, entries))
    counts = verdicts.verdict.value_counts()
    table.notes = [
        "line: of the paper's source. The CSV says what each statement compares. Differences are paired by base model,"
        " objective and seed, over runs that forgot and (unless the statement is about what is retained) kept more than"
        " chance. The interval is a 95 % t-interval over runs of all objectives, or their range below three runs. Kinds"
        " of base models are judged apart: a statement holds if it holds for each. A statement that sets one method"
        " above another asks for a third of the paper's difference (ours: 0.05, or 5 points). Seeds of one base model"
        f" are not independent of each other, and the {(verdicts.runs > 2).sum()} intervals are not corrected for their"
        " number; where each objective has one run, they are intervals over objectives.",
        "; ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in VERDICTS) + ".",
    ]
    return table
