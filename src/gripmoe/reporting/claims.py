"""Statements decided by measurement: holds, does not hold, undecided, not measured."""

from __future__ import annotations

import hashlib
import json
from math import nan
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd

from gripmoe.config.reading import read_catalogue
from gripmoe.config.types import Name, Strict
from gripmoe.io.files import read_yaml
from gripmoe.reporting import names
from gripmoe.reporting.collect import SHARED
from gripmoe.reporting.comparison import collapsed, unforgotten
from gripmoe.reporting.runs import KEYS, apart, of_kind
from gripmoe.reporting.tables import MISSING, Cell, Table, fixed, signed
from gripmoe.reporting.uncertainty import LEAST, complete_cells, holm, misses, p_above, student, units

PAIRED_BY = ["model", "benchmark", "objective", "seed"]
RETAINED = (*SHARED, "retain_accuracy_five_shot", "tradeoff_area")
COLOURS = {"holds": "#0072b2", "does not hold": "#d55e00", "undecided": "#000000", "not measured": "#7f7f7f"}
VERDICTS = tuple(COLOURS)
DECIDED = VERDICTS[:2]
OF_SEVERAL = {"holds": "hold", "does not hold": "do not hold"}
ALPHA = 0.05
MOST_UNITS = 100  # a number of base models or runs above it is not told
POWER = 0.8  # the probability with which that number decides


class Claim(Strict):
    """A row of claims.yaml, which says what the keys mean."""

    text: str
    line: int | Literal["ours"]
    metric: Name
    left: Name
    relation: Literal[">", "<", "~"]
    right: int | float | Name
    right_metric: Name | None = None
    margin: int | float = 0
    kind: Literal["letters", "news"] = "letters"
    unreached: bool = False
    each_objective: bool = False
    only_in: Name | None = None

    @property
    def metric_of_right(self) -> str:
        return self.right_metric or self.metric

    @property
    def compares_methods(self) -> bool:
        """Whether `right` is a method, and no number."""
        return isinstance(self.right, str)


def load_claims() -> dict[str, Claim]:
    """All claims by name. Raises ConfigError for a row that is not valid."""
    return read_catalogue(Path(__file__).with_name("claims.yaml"), Claim)


def primary_claims(family: str = "claims") -> list[str]:
    """The claims that were named before most runs; with "replication" or "wide" those that further base models test.
    Raises ValueError if one of them has been changed since."""
    named, claims = read_yaml(Path(__file__).with_name("primary.yaml"))[family], load_claims()
    given = {name: claim.model_dump(exclude_unset=True) for name, claim in claims.items()}
    rows = json.dumps({name: given.get(name) for name in named["claims"]}, sort_keys=True)
    if (digest := hashlib.sha256(rows.encode()).hexdigest()[:16]) != named["digest"]:
        raise ValueError(f"primary.yaml: {family}: {named['digest']} is not {digest}: a primary claim was changed")
    return named["claims"]


def differences(runs: pd.DataFrame, claim: Claim, forgot: bool = False) -> pd.Series:
    """Left minus right of every run that has both, indexed by PAIRED_BY. The two sides are paired by these; with the
    original or the retrained model by base model and benchmark.

    With `forgot`, runs that have not forgotten, also those whose correction undid it, are left out, unless the claim is
    about them too (`unreached`). So are collapsed runs, from which nothing can be recovered, unless the claim is about
    what is retained."""
    if not (runs.method == claim.left).any():
        return pd.Series(dtype=float, index=pd.MultiIndex.from_tuples([], names=PAIRED_BY))
    runs = of_kind(runs[runs.method.isin([claim.left, claim.right])], claim.kind)
    left_out = unforgotten(runs) if forgot and not claim.unreached else []
    left_out += collapsed(runs) if forgot and claim.metric.removesuffix("_share") not in RETAINED else []
    runs = runs[runs.metric.isin([claim.metric, claim.metric_of_right]) & runs.value.notna()]
    if left_out:
        runs = runs[~pd.MultiIndex.from_frame(runs[KEYS]).isin(left_out)]
    left = runs[(runs.metric == claim.metric) & (runs.method == claim.left)].set_index(PAIRED_BY).value
    if not claim.compares_methods:
        return left - claim.right
    right = runs[(runs.metric == claim.metric_of_right) & (runs.method == claim.right)]
    if claim.right in names.NOT_UNLEARNED:  # one for all objectives and seeds
        of_model = right.set_index(["model", "benchmark"]).value
        baseline = left.index.droplevel(["objective", "seed"]).map(of_model)
        return (left - pd.Series(baseline, index=left.index, dtype=float)).dropna()
    return (left - right.set_index(PAIRED_BY).value).dropna()


class Part(NamedTuple):
    """The runs of a claim that are judged together."""

    name: str  # what sets them apart from the others; empty if there are no others
    runs: pd.Series  # a difference per run
    values: pd.Series  # and per base model, fact set, or run of a single base model
    p_holds: float
    p_fails: float


def _parts(pairs: pd.Series, claim: Claim, by_fact_set: bool = False) -> list[Part]:
    """Kinds of base models and benchmarks are judged apart, and with `each_objective` also objectives. With
    `by_fact_set` the units are the fact sets, each the mean of its base models."""
    if pairs.empty:
        return []
    by = ["model", "benchmark", *["objective"] * claim.each_objective]
    groups = sorted(apart(pairs.rename("value").reset_index(), by), key=itemgetter(0))
    parts = []
    for name, group in groups:
        of_group = group.set_index(PAIRED_BY).value
        runs = complete_cells(of_group)
        values = units(of_group)  # not of `runs`: of several base models one may be left, whose runs are no units
        if by_fact_set and "objective" not in values.index.names:
            fact_sets = group.drop_duplicates("model").set_index("model").benchmark
            values = values.groupby(fact_sets).mean()
        parts.append(Part(name, runs, values, *_p_values(values, claim)))
    return parts


def _p_values(values: pd.Series, claim: Claim) -> tuple[float, float]:
    """p of the hypotheses that the claim does not hold, and that it holds: below 0.05 where the whole 95 % interval is
    on the claim's side of its margin, or none of it is. Fewer values than an interval needs decide nothing."""
    if len(values) < LEAST:
        return 1.0, 1.0
    margin, mirrored = claim.margin, -values
    if claim.relation == "~":
        inside = max(p_above(values, -margin), p_above(mirrored, -margin))
        return inside, min(p_above(values, margin), p_above(mirrored, margin))
    beyond = mirrored if claim.relation == "<" else values
    return p_above(beyond, margin), p_above(-beyond, -margin)


class Judgement(NamedTuple):
    """A verdict, and the values of the part that gives it."""

    verdict: str
    part: str
    runs: pd.Series
    values: pd.Series  # of base models or fact sets, or of the runs of one base model
    difference: float
    low: float
    high: float

    @property
    def unit(self) -> str:
        return "run" if isinstance(self.values.index, pd.MultiIndex) else "base model"


def p_of(parts: list[Part]) -> float:
    """p of the verdict that is nearer. A claim holds if it holds for all parts, and does not hold if it does not for
    one: that one's p is multiplied by the number of parts. Without parts 1."""
    if not parts:
        return 1.0
    return min(max(part.p_holds for part in parts), min(part.p_fails for part in parts) * len(parts))


def judge(pairs: pd.Series, claim: Claim, alpha: float = ALPHA, by_fact_set: bool = False) -> Judgement:
    """Verdict, and the interval of the part that gives it: at the level of the verdict, or the range of fewer than
    three values."""
    return _judgement(_parts(pairs, claim, by_fact_set), pairs, alpha)


def _judgement(parts: list[Part], pairs: pd.Series, alpha: float) -> Judgement:
    if not parts:
        return Judgement("not measured", "", pairs, pairs, nan, nan, nan)
    part, worst = max(parts, key=lambda part: part.p_holds), min(parts, key=lambda part: part.p_fails)
    verdict, level = "undecided", alpha
    if part.p_holds <= alpha:
        verdict = "holds"
    elif worst.p_fails <= alpha / len(parts):
        verdict, part, level = "does not hold", worst, alpha / len(parts)
    values = part.values
    mean, low, high = values.mean(), values.min(), values.max()
    if len(values) >= LEAST:
        half = student(values, 1 - level)
        low, high = mean - half, mean + half
    return Judgement(verdict, part.name, part.runs, values, float(mean), float(low), float(high))


def units_to_decide(values: pd.Series, claim: Claim, alpha: float = ALPHA) -> int | None:
    """How many base models or runs decide an undecided claim with a probability of POWER if mean and standard deviation
    are as they were measured. None for one value, or above MOST_UNITS."""
    mean, deviation, margin = values.mean(), values.std(), claim.margin
    limits = {"~": (-margin, margin), ">": (margin,), "<": (-margin,)}[claim.relation]
    gaps = sorted(abs(mean - limit) for limit in limits)
    if abs(mean) > margin:
        gaps = gaps[:1]  # beyond both limits, an interval has to clear the nearer one alone
    for n in range(len(values) + 1, MOST_UNITS + 1):
        if sum(misses(gap, deviation, n, alpha) for gap in gaps) <= 1 - POWER:
            return n
    return None  # also for one value, whose deviation is NaN


def _to_decide(runs: pd.DataFrame, found: Judgement, claim: Claim, alpha: float) -> str:
    """What would decide a claim that is not."""
    if found.verdict == "not measured":
        runs = of_kind(runs, claim.kind)
        measured = set(runs.method[runs.metric == claim.metric])
        sides = dict.fromkeys([claim.left, claim.right] if claim.compares_methods else [claim.left])
        missing = [side for side in sides if side not in measured]
        return f"runs of {' and '.join(missing)}" if missing else "runs of both on one base model"
    if found.verdict != "undecided":
        return ""
    if needed := units_to_decide(found.values, claim, alpha):
        return f"about {needed} {found.unit}s"
    return f"three {found.unit}s or more" if len(found.values) < LEAST else f"> {MOST_UNITS} {found.unit}s"


def all_verdicts(runs: pd.DataFrame, family: str = "claims") -> pd.DataFrame:
    """All claims with their verdicts, one row each, without those of another family alone. The primary claims (of that
    `family`) are judged together, by Holm's levels, measured or not; every other claim at 0.05. Columns `forgot_` are
    of the runs that forgot, at the same level; `fact_set_verdict` takes fact sets as units; `by_objective` has the mean
    difference under each objective."""
    claims = {name: claim for name, claim in load_claims().items() if claim.only_in in (None, family)}
    primary = primary_claims(family)
    pairs = {name: differences(runs, claim) for name, claim in claims.items()}
    parts = {name: _parts(found, claims[name]) for name, found in pairs.items()}
    p_values = pd.Series({name: p_of(found) for name, found in parts.items()}, dtype=float)
    of_family = p_values.index.isin(primary)
    holm_levels = pd.concat([holm(p_values[of_family], ALPHA), holm(p_values[~of_family], ALPHA)])
    rows = []
    for name, claim in claims.items():
        level = holm_levels[name] if name in primary else ALPHA
        found = _judgement(parts[name], pairs[name], level)
        forgot = differences(runs, claim, forgot=True)
        of_forgot = found if forgot.equals(pairs[name]) else judge(forgot, claim, level)
        row = {
            "claim": name,
            "text": claim.text,
            "line": claim.line,
            "comparison": _formula(claim),
            "primary": name in primary,
            "of": found.part,
            "unit": found.unit,
            "units": len(found.values),
            "runs": len(found.runs),
            "by_objective": _by_objective(found.runs, claim),
            "difference": found.difference,
            "low": found.low,
            "high": found.high,
            "verdict": found.verdict,
            "p": p_values[name],
            "level": level,
            "survives_holm": bool(p_values[name] <= holm_levels[name]),
            "fact_set_verdict": judge(pairs[name], claim, level, by_fact_set=True).verdict,
            "forgot_runs": len(of_forgot.runs),
            "forgot_difference": of_forgot.difference,
            "forgot_verdict": of_forgot.verdict,
            "to_decide": _to_decide(runs, found, claim, level),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _by_objective(pairs: pd.Series, claim: Claim) -> str:
    """What was measured under each objective, mean over base models, as "GD +0.05, KL -0.05"."""
    means = {name: units(group).mean() for name, group in pairs.groupby(level="objective")}
    shown = names.ordered(means, names.OBJECTIVES)
    return ", ".join(f"{names.objective_label(name)} {as_text(means[name], claim)}".strip() for name in shown)


def as_text(difference: float, claim: Claim) -> str:
    """A difference as a reader looks for it: signed between two methods, and the left value itself where the claim
    compares it with a number."""
    return signed(fixed(difference, 2)) if claim.compares_methods else fixed(difference + claim.right, 2)


def value_and_interval(row, claim: Claim) -> tuple[str, str, str]:
    """What was measured, and the ends of its interval, of a Judgement or a row of `all_verdicts`."""
    return tuple(as_text(number, claim) for number in (row.difference, row.low, row.high))


def _formula(claim: Claim) -> str:
    """What is compared, as "RS: expert_specific > frozen_router + 0.13"."""
    right = claim.right if claim.compares_methods else f"{claim.right:g}"
    if claim.right_metric:
        right += f" ({names.metric(claim.right_metric).heading})"
    if claim.margin:
        right += f" {({'>': '+', '<': '-', '~': '±'})[claim.relation]} {claim.margin:g}"
    return f"{names.metric(claim.metric).heading}: {claim.left} {claim.relation} {right}"


def _asked(claim: Claim) -> str:
    """What a claim asks of the measured value: "> +0.13" between two methods, "> 0.94" of one."""
    if not claim.compares_methods:
        return f"{claim.right:g} ± {claim.margin:g}" if claim.relation == "~" else f"{claim.relation} {claim.right:g}"
    signs = {">": "> +", "<": "< -", "~": "± "} if claim.margin else {">": "> ", "<": "< "}
    return f"{signs[claim.relation]}{claim.margin:g}"


def replication_table(before: pd.DataFrame, runs: pd.DataFrame, family: str) -> Table:
    """The claims of a family that `runs` test: before, on these runs alone, and an estimate from both together."""
    claims, again = load_claims(), primary_claims(family)
    first, found = all_verdicts(before, "claims" if family == "replication" else family), all_verdicts(runs, family)
    rows = found[found.claim.isin(again)].reset_index(drop=True)
    table = Table(["asked for", "before", "these", "both"], heading="Statement")
    entries, estimates = [], []
    for row in rows.itertuples():
        claim = claims[row.claim]
        of_both = judge(differences(pd.concat([before, runs]), claim), claim)
        estimates.append((len(of_both.values), of_both.difference, of_both.low, of_both.high))
        cells = [Cell(_asked(claim))]
        for each in (first[first.claim == row.claim].iloc[0], row):
            text = f"{_spread(each, claim)}, n = {each.units}: {each.verdict}"
            cells.append(Cell(text, each.difference, colour=COLOURS[each.verdict]))
        cells.append(Cell(f"{_spread(of_both, claim)}, n = {len(of_both.values)}", of_both.difference))
        entries.append((row.text, cells if row.units else [cells[0], *[Cell(MISSING)] * 3], []))
    table.blocks.append(("", entries))
    names_of_both = ["both_units", "both_difference", "both_low", "both_high"]
    table.data = rows.join(pd.DataFrame(estimates, columns=names_of_both))
    table.notes = [
        "Measured value, its interval, the number of base models (n), and the verdict. Before: base models that had "
        "been seen when the statements were named, at Holm's level. These: further base models, and the same code, "
        "settings and kind of model; they alone test the statements, at Holm's level among them. Both: all base "
        "models, an estimate with a 95 % interval and without a verdict."
    ]
    return table


def _spread(found, claim: Claim) -> str:
    value, low, high = value_and_interval(found, claim)
    return f"{value} ({low} .. {high})"


def claims_table(runs: pd.DataFrame) -> Table:
    """The verdicts as a table of one page: the primary claims, the paper's others, then ours."""
    verdicts, claims = all_verdicts(runs), load_claims()
    columns = ["line", "measured", "interval", "asked for", "by objective", "n", "verdict"]
    columns += ["fact sets as units", "of those that forgot", "to decide"]
    table = Table(columns, heading="Statement", data=verdicts)
    ours = verdicts.line == "ours"
    groups = {
        "Primary, named before most runs": verdicts.primary,
        "The paper's other statements, exploratory": ~verdicts.primary & ~ours,
        "Ours, exploratory": ~verdicts.primary & ours,
    }
    for name, chosen in groups.items():
        entries = []
        for row in verdicts[chosen].itertuples():
            claim, value, spread = claims[row.claim], Cell(MISSING), Cell(MISSING)
            if row.verdict != "not measured":
                text, low, high = value_and_interval(row, claim)
                value, spread = Cell(text, row.difference), Cell(f"{low} .. {high}", row.high - row.low)
            verdict = Cell(row.verdict, best=row.verdict == "holds", colour=COLOURS[row.verdict])
            number = Cell(f"{row.units} of {row.runs} runs" if row.unit == "base model" else f"{row.runs}", row.units)
            asked, of_fact_sets = Cell(_asked(claim)), Cell(row.fact_set_verdict)
            shown = [Cell(str(row.line)), value, spread, asked, Cell(row.by_objective), number, verdict, of_fact_sets]
            forgot = Cell(MISSING)
            if row.forgot_verdict != "not measured":
                text = f"{as_text(row.forgot_difference, claim)}, {row.forgot_runs} runs, {row.forgot_verdict}"
                forgot = Cell(text, row.forgot_difference)
            entries.append((row.text + f" ({row.of})" * bool(row.of), [*shown, forgot, Cell(row.to_decide)], []))
        table.blocks.append((name, entries))
    decided = verdicts[verdicts.verdict.isin(DECIDED)]
    of_others = decided[~decided.primary]
    survive = of_others.survives_holm.sum()
    table.notes = [
        "Measured: the difference of two methods, paired by base model, objective and seed, or the value of one; means "
        "over all runs. The unit (n) is the base model. Where a single one was measured, it is the run, and the "
        "verdict is about this base model alone. Fact sets as units: the verdict if each fact set counts once, as "
        "its base models are alike. The interval is a t-interval at the level of the verdict, or the range of fewer "
        "than three values. line: of the paper's source; asked for: between two methods a third of the paper's "
        "difference (ours: 0.05, or 5 points). The CSV has what is compared, and differences from the number asked "
        "for.",
        "The primary statements are a family, corrected by Holm. The others are judged at 95 %, uncorrected: "
        f"{survive} of their {len(of_others)} verdicts survive Holm over all of them. Of those that forgot: the "
        "verdict at the same level without runs that missed the forget target. Statements that are not about retain "
        "accuracy leave out runs with retain accuracy at chance, too. To decide: the number of units, of new fact "
        f"sets, with which a verdict has a probability of {POWER:g}, if their mean and spread are the same. Kinds of "
        "base models are judged apart, and a row shows the part that decides; of several parts each is judged at a "
        "stricter level.",
        f"{counted(verdicts)}.",
    ]
    return table


def counted(verdicts: pd.DataFrame) -> str:
    """How many claims have each verdict, as "28 hold; 1 does not hold"."""
    counts = verdicts.verdict.value_counts()
    numbers = {verdict: int(counts.get(verdict, 0)) for verdict in VERDICTS}
    return "; ".join(f"{n} {name if n == 1 else OF_SEVERAL.get(name, name)}" for name, n in numbers.items())
