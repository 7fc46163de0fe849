"""Two methods on the same questions: paired bootstrap intervals and McNemar's test, with runs as the outer level."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from gripmoe.reporting import labels
from gripmoe.reporting.tables import MISSING, Cell, Table, without_zeros

RUN = ["model", "benchmark", "seed"]
RESAMPLES = 4000


def load_answers(runs: Path) -> pd.DataFrame:
    """The table of answers that belongs to the table of `runs`: a row per cell and question."""
    return pd.read_csv(runs.with_name(runs.name.replace("runs_", "answers_", 1)))


def mcnemar(left: np.ndarray, right: np.ndarray) -> float:
    """Exact two-sided p that two models are right equally often, from the questions on which they differ."""
    only_left, only_right = int((left & ~right).sum()), int((right & ~left).sum())
    if only_left + only_right == 0:
        return 1.0
    return float(stats.binomtest(only_left, only_left + only_right).pvalue)


def paired_interval(differences: list[pd.Series], seed: int = 0, level: float = 0.95) -> tuple[float, float, float]:
    """Mean difference over runs and its bootstrap interval. A run's series holds left minus right per question, indexed
    by the fact that it asks about: runs are drawn with replacement, and facts within each run drawn."""
    generator = np.random.default_rng(seed)
    means = np.empty((len(differences), RESAMPLES))
    for row, difference in enumerate(differences):
        facts = difference.groupby(level=0)
        sums, counts = facts.sum().to_numpy(), facts.count().to_numpy()
        drawn = generator.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), RESAMPLES)
        means[row] = (drawn @ sums) / (drawn @ counts)
    chosen = generator.integers(len(differences), size=(len(differences), RESAMPLES))
    resampled = np.take_along_axis(means, chosen, axis=0).mean(axis=0)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return float(np.mean([difference.mean() for difference in differences])), float(low), float(high)


def compared(answers: pd.DataFrame, objective: str, method: str, against: str, domain: str) -> dict[str, float] | None:
    """`method` minus `against` on forget or retain questions, over the runs that have both: the mean difference, its
    interval, and the largest McNemar p of a run. None if no run has both."""
    asked = answers[(answers.objective == objective) & ((answers.exposure == "forget") == (domain == "forget"))]
    sides = [dict(list(asked[asked.method == name].groupby(RUN))) for name in (method, against)]
    differences, p_values = [], []
    for run in sorted(set(sides[0]) & set(sides[1])):
        left, right = (side[run].set_index("id") for side in sides)
        both = left.join(right.correct, rsuffix="_right", how="inner")
        differences.append(pd.Series((both.correct - both.correct_right).to_numpy(), index=both.fact))
        p_values.append(mcnemar(both.correct.to_numpy(bool), both.correct_right.to_numpy(bool)))
    if not differences:
        return None
    mean, low, high = paired_interval(differences)
    return {"difference": mean, "low": low, "high": high, "p": max(p_values), "runs": len(differences)}


def paired_table(answers: pd.DataFrame, runs: pd.DataFrame, against: str = "unconstrained") -> Table:
    """Every method beside `against`, question by question; and, so that "always A" is seen for what it is, how often
    the commonest letter is given on forget questions and what accuracy is left when choices change places."""
    columns = ["Δ FA", "95 %", "p", "Δ RA", "95 %", "p", "letter", "shuffled"]
    table = Table(columns, [], label_width=1.7)
    for objective in [o for o in labels.OBJECTIVES if o != "none" and o in set(answers.objective)]:
        entries = []
        present = set(answers[answers.objective == objective].method)
        for method in [m for m in labels.METHODS if m in present]:
            cells = []
            for domain in ("forget", "retain"):
                found = None if method == against else compared(answers, objective, method, against, domain)
                cells += _cells(found)
            chosen = answers[(answers.objective == objective) & (answers.method == method)]
            letters = chosen[chosen.exposure == "forget"].groupby([*RUN, "chosen"]).size().groupby(RUN)
            share = float((letters.max() / letters.sum()).mean())
            of_method = runs[(runs.objective == objective) & (runs.method == method)]
            shuffled = of_method.loc[of_method.metric == "prompt_choice_shuffle", "value"].mean()
            cells += [Cell(f"{share:.2f}", share), Cell(MISSING if np.isnan(shuffled) else f"{shuffled:.2f}", shuffled)]
            entries.append((labels.method_label(method), cells, []))
        table.blocks.append((labels.OBJECTIVES[objective], entries))
    table.notes = [
        f"Differences to {labels.method_label(against).lower()} on the same test questions; 95 % bootstrap intervals,"
        f" {RESAMPLES} resamples of runs and of facts within runs; p: exact McNemar test, the largest of a run.",
        "letter: share of the letter given most on forget questions; shuffled: FA with choices in another order.",
    ]
    return table


def _cells(found: dict[str, float] | None) -> list[Cell]:
    if found is None:
        return [Cell(MISSING) for _ in range(3)]
    p = found["p"]
    return [
        Cell(f"{round(found['difference'], 2) + 0.0:+.2f}", found["difference"]),
        Cell(without_zeros(f"{found['low']:+.2f} .. {found['high']:+.2f}"), found["high"] - found["low"]),
        Cell("< .001" if p < 0.001 else f"{p:.3f}"[1:] if p < 1 else "1", p),
    ]
