"""Statements decided by measurement: holds, does not hold, undecided, not measured."""

from __future__ import annotations

import hashlib
import json
from math import nan
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from scipy import stats

from gripmoe.config.grid import NO_OBJECTIVE
from gripmoe.io.files import read_yaml
from gripmoe.reporting import names
from gripmoe.reporting.collect import KEYS, SHARED, of_kind
from gripmoe.reporting.comparison import collapsed, unforgotten
from gripmoe.reporting.tables import MISSING, Cell, Table, fixed
from gripmoe.reporting.uncertainty import LEAST, holm, p_above, units

RUN = ["model", "benchmark", "objective", "seed"]
RETAINED = (*SHARED, "retain_accuracy_five_shot")
COLOURS = {"holds": "#0072b2", "does not hold": "#d55e00", "undecided": "#000000", "not measured": "#7f7f7f"}
VERDICTS = tuple(COLOURS)
ALPHA = 0.05
MOST_UNITS = 100  # a number of base models or runs above it is not told


def load_claims() -> dict[str, dict]:
    return read_yaml(Path(__file__).with_name("claims.yaml"))


def primary_claims() -> list[str]:
    """The claims that were named before the runs. Raises ValueError if one of them has been changed since."""
    named, claims = read_yaml(Path(__file__).with_name("primary.yaml")), load_claims()
    rows = json.dumps({name: claims[name] for name in named["claims"]}, sort_keys=True)
    if (digest := hashlib.sha256(rows.encode()).hexdigest()[:16]) != named["digest"]:
        raise ValueError(f"primary.yaml: digest {named['digest']} is not {digest}: a primary claim was changed")
    return named["claims"]


def differences(runs: pd.DataFrame, claim: dict, forgot: bool = False) -> pd.Series:
    """Left minus right of every run that has both, indexed by RUN. The two sides are paired by base model, benchmark,
    objective and seed; with the original or the retrained model by base model and benchmark.

    With `forgot`, runs that have not forgotten, also those whose correction undid it, are left out, unless the claim is
    about them too (`unreached`). So are collapsed runs, from which nothing can be recovered, unless the claim is about
    what is retained."""
    runs = of_kind(runs, claim.get("kind", "letters"))
    left_out = [unforgotten(runs)] if forgot and not claim.get("unreached") else []
    left_out += [collapsed(runs)] if forgot and claim["metric"].removesuffix("_share") not in RETAINED else []
    for out in left_out:
        runs = runs[~runs.set_index(KEYS).index.isin(out.set_index(KEYS).index)]
    if "objectives" in claim:
        runs = runs[runs.objective.isin([*claim["objectives"], NO_OBJECTIVE])]
    runs = runs[runs.value.notna()]
    left = runs[(runs.metric == claim["metric"]) & (runs.method == claim["left"])].set_index(RUN).value
    if not isinstance(claim["right"], str):
        return left - claim["right"]
    right = runs[(runs.metric == claim.get("right_metric", claim["metric"])) & (runs.method == claim["right"])]
    if claim["right"] in names.ORIGINALS:  # one for all objectives and seeds
        of_model = right.set_index(["model", "benchmark"]).value
        baseline = left.index.droplevel(["objective", "seed"]).map(of_model)
        return (left - pd.Series(baseline, index=left.index, dtype=float)).dropna()
    return (left - right.set_index(RUN).value).dropna()


class Part(NamedTuple):
    """The runs of a claim that are judged together."""

    name: str  # what sets them apart from the others; empty if there are no others
    values: pd.Series  # a difference per base model or run
    p_holds: float
    p_fails: float


def _parts(pairs: pd.Series, claim: dict) -> list[Part]:
    """Kinds of base models and benchmarks are judged apart, and with `each_objective` also objectives."""
    labels = {
        "model": pairs.index.get_level_values("model").map(names.model_label),
        "benchmark": pairs.index.get_level_values("benchmark").map(names.benchmark_label),
    }
    if claim.get("each_objective"):
        labels["objective"] = pairs.index.get_level_values("objective").map(names.objective_label)
    of = pd.DataFrame({key: list(values) for key, values in labels.items()}, index=pairs.index)
    apart = [key for key in of if of[key].nunique() > 1]
    groups = pairs.groupby(of[apart].agg(", ".join, axis=1)) if apart else [("", pairs)]
    return [Part(name, values := units(part), *_p_values(values, claim)) for name, part in groups]


def _p_values(values: pd.Series, claim: dict) -> tuple[float, float]:
    """p of the hypotheses that the claim does not hold, and that it holds: below 0.05 where the whole 95 % interval is
    on the claim's side of its margin, or none of it is. Fewer values than an interval needs decide nothing."""
    if len(values) < LEAST:
        return 1.0, 1.0
    margin, mirrored = claim.get("margin", 0.0), -values
    if claim["relation"] == "~":
        inside = max(p_above(values, -margin), p_above(mirrored, -margin))
        return inside, min(p_above(values, margin), p_above(mirrored, margin))
    beyond = mirrored if claim["relation"] == "<" else values
    return p_above(beyond, margin), p_above(-beyond, -margin)


class Judgement(NamedTuple):
    verdict: str
    part: str
    units: int
    mean: float
    low: float
    high: float


def p_of(parts: list[Part]) -> float:
    """p of the verdict that is nearer. A claim holds if it holds for all parts, and does not hold if it does not for
    one: that one's p is multiplied by the number of parts."""
    return min(max(part.p_holds for part in parts), min(part.p_fails for part in parts) * len(parts))


def judge(pairs: pd.Series, claim: dict, alpha: float = ALPHA) -> Judgement:
    """Verdict, and the interval of the part that gives it: at the level of the verdict, or the range of fewer than
    three values."""
    if pairs.empty:
        return Judgement("not measured", "", 0, nan, nan, nan)
    parts = _parts(pairs, claim)
    weakest, worst = max(parts, key=lambda part: part.p_holds), min(parts, key=lambda part: part.p_fails)
    if weakest.p_holds <= alpha:
        verdict, part = "holds", weakest
    elif worst.p_fails <= (alpha := alpha / len(parts)):
        verdict, part = "does not hold", worst
    else:
        verdict, part = "undecided", weakest
    values = part.values
    mean, low, high = values.mean(), values.min(), values.max()
    if len(values) >= LEAST:
        half = stats.t.ppf(1 - alpha / 2, len(values) - 1) * values.sem()
        low, high = mean - half, mean + half
    return Judgement(verdict, part.name, len(values), float(mean), float(low), float(high))


def units_to_decide(values: pd.Series, claim: dict) -> int | None:
    """How many base models or runs would decide an undecided claim if further ones were as these: the fewest whose 95 %
    t-interval of the same mean and standard deviation misses the margin. None without a spread, or above MOST_UNITS."""
    mean, deviation = values.mean(), values.std()
    margin = claim.get("margin", 0.0)
    limits = {"~": (-margin, margin), ">": (margin,), "<": (-margin,)}[claim["relation"]]
    gap = min(abs(mean - limit) for limit in limits)
    enough = (n for n in range(len(values) + 1, MOST_UNITS + 1) if stats.t.ppf(0.975, n - 1) * deviation < gap * n**0.5)
    return next(enough, None) if len(values) > 1 else None


def _to_decide(runs: pd.DataFrame, pairs: pd.Series, claim: dict, verdict: str) -> str:
    """What would decide a claim that is not."""
    if verdict == "not measured":
        measured = set(runs.method[runs.metric == claim["metric"]])
        missing = [side for side in (claim["left"], claim["right"]) if isinstance(side, str) and side not in measured]
        return f"runs of {' and '.join(missing)}" if missing else f"the metric {claim['metric']}"
    if verdict != "undecided":
        return ""
    values = units(pairs)
    name = "base models" if len(values) < len(pairs) else "runs"
    if needed := units_to_decide(values, claim):
        return f"about {needed} {name}"
    return "three runs or more" if len(values) < LEAST else f"> {MOST_UNITS} {name}"


def judged(runs: pd.DataFrame) -> pd.DataFrame:
    """All claims with their verdicts, one row each. The primary claims are judged as a family, by Holm's levels; every
    other claim at 0.05. Columns `forgot_` are of the runs that forgot."""
    claims, primary = load_claims(), primary_claims()
    pairs = {name: differences(runs, claim) for name, claim in claims.items()}
    p_values = pd.Series(
        {name: p_of(_parts(found, claims[name])) for name, found in pairs.items() if not found.empty}, dtype=float
    )
    family = p_values.index.isin(primary)
    levels = {group: holm(p_values[chosen], ALPHA) for group, chosen in ((True, family), (False, ~family))}
    rows = []
    for name, claim in claims.items():
        is_primary = name in primary
        level = levels[is_primary].get(name, ALPHA)
        of_all = judge(pairs[name], claim, level if is_primary else ALPHA)
        of_forgot = judge(forgot := differences(runs, claim, forgot=True), claim)
        row = {"claim": name, "text": claim["text"], "line": claim["line"], "comparison": _formula(claim)}
        row |= {"primary": is_primary, "runs": len(pairs[name]), "units": of_all.units, "of": of_all.part}
        row |= {"objectives": " ".join(sorted(pairs[name].index.unique("objective")))}
        row |= {"difference": of_all.mean, "low": of_all.low, "high": of_all.high, "verdict": of_all.verdict}
        row |= {"p": p_values.get(name, nan), "level": level if is_primary else ALPHA}
        row |= {"survives_holm": bool(p_values.get(name, 1.0) <= level)}
        row |= {"forgot_runs": len(forgot), "forgot_difference": of_forgot.mean, "forgot_verdict": of_forgot.verdict}
        rows.append(row | {"to_decide": _to_decide(runs, pairs[name], claim, of_all.verdict)})
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


def _asked(claim: dict) -> str:
    """The margin of a claim, as "> +0.13"."""
    margin = claim.get("margin", 0.0)
    signs = {">": "> +", "<": "< -", "~": "± "} if margin else {">": "> ", "<": "< "}
    return f"{signs[claim['relation']]}{margin:g}"


def claims_table(runs: pd.DataFrame) -> Table:
    """The verdicts as a table of one page: the primary claims, the paper's others, then ours."""
    verdicts, claims = judged(runs), load_claims()
    columns = ["line", "difference", "interval", "asked for", "n", "verdict", "of those that forgot", "to decide"]
    table = Table(columns, heading="Statement", data=verdicts)
    ours = verdicts.line == "ours"
    groups = {
        "Primary, named before the runs": verdicts.primary,
        "The paper's other statements, exploratory": ~verdicts.primary & ~ours,
        "Ours, exploratory": ~verdicts.primary & ours,
    }
    for name, chosen in groups.items():
        entries = []
        for row in verdicts[chosen].itertuples():
            difference, spread = Cell(MISSING), Cell(MISSING)
            if row.verdict != "not measured":
                difference = Cell(_signed(row.difference), row.difference)
                spread = Cell(f"{_signed(row.low)} .. {_signed(row.high)}", row.high - row.low)
            verdict = Cell(row.verdict, best=row.verdict == "holds", colour=COLOURS[row.verdict])
            number = Cell(f"{row.units} ({row.runs})" if row.units != row.runs else f"{row.runs}", row.units)
            shown = [Cell(str(row.line)), difference, spread, Cell(_asked(claims[row.claim])), number, verdict]
            forgot = Cell(MISSING)
            if row.forgot_verdict != "not measured":
                text = f"{_signed(row.forgot_difference)}, {row.forgot_verdict}"
                forgot = Cell(text, row.forgot_difference)
            entries.append((row.text + f" ({row.of})" * bool(row.of), [*shown, forgot, Cell(row.to_decide)], []))
        table.blocks.append((name, entries))
    counts = verdicts.verdict.value_counts()
    decided = verdicts[verdicts.verdict.isin(VERDICTS[:2])]
    of_others = decided[~decided.primary]
    survive = of_others.survives_holm.sum()
    table.notes = [
        "Differences, as the CSV tells them, are paired by base model, objective and seed, of all runs. Their unit "
        "is the base model where at least three were measured (n: base models, and runs in brackets), else the "
        "run. The interval is a t-interval at the level of the verdict, or the range of fewer than three values. "
        "line: of the paper's source; asked for: between two methods a third of the paper's difference (ours: "
        "0.05, or 5 points).",
        "The primary statements are a family, corrected by Holm. The others have 95 % intervals, uncorrected: "
        f"{survive} of their {len(of_others)} verdicts survive Holm over all of them. Of those that forgot: without "
        "runs that missed the forget target or, where it is not about what is retained, kept no more than chance. "
        "Kinds of base models are judged apart, and a row shows the part that decides.",
        "; ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in VERDICTS) + ".",
    ]
    return table
