"""Paired comparison of two methods on the same items: intervals with base models or runs as the outer level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd

from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.reporting import names
from gripmoe.reporting.runs import apart
from gripmoe.reporting.tables import MISSING, Cell, Table, signed, with_half_width
from gripmoe.reporting.uncertainty import LEAST, student, t_quantile

RUN_OF_OBJECTIVE = ["model", "benchmark", "seed"]
AGAINST = "unconstrained"
RESAMPLES = 4000
LEAST_TAIL = 50  # resamples beyond an end of an interval, below which they do not tell where it lies
MANY_FACTS = 30  # with fewer, intervals of a bootstrap are too narrow
MEASURES = ("forget_accuracy", "retain_accuracy", "verbmem", "knowmem_forget", "knowmem_retain")


def paired_interval(
    differences: list[pd.Series], models: Sequence[str] = (), level: float = 0.95
) -> tuple[float, float, float]:
    """Mean difference and its interval. A run's series has left minus right per item, indexed by the fact that the item
    asks about. `models` names the base model of each run, and each base model has the same weight. With three or more
    base models, the interval is Student's over their means. With fewer, it is a bootstrap that draws runs and facts
    with replacement. Each resample has the same facts in all runs, because the runs ask about the same facts. With
    fewer than MANY_FACTS facts the interval is at least as wide as Student's over facts. For a single run it is that
    interval, and also at a level so strict that fewer than LEAST_TAIL resamples lie beyond each end. The interval of
    one fact has no width. Raises ValueError for one fact at so strict a level."""
    of_runs = pd.Series([difference.mean() for difference in differences], list(models) or [""] * len(differences))
    of_models = of_runs.groupby(level=0).mean()
    mean = float(of_models.mean())
    if len(of_models) >= LEAST:
        half = student(of_models, level)
        return mean, mean - half, mean + half
    of_items = pd.concat(differences)
    few = 1 < of_items.index.nunique() < MANY_FACTS
    if len(differences) == 1 and (few or RESAMPLES * (1 - level) / 2 < LEAST_TAIL):
        half = _over_facts(of_items, level)
        return mean, mean - half, mean + half
    facts = [difference.groupby(level=0) for difference in differences]
    sums_FR = pd.concat([of_run.sum() for of_run in facts], axis=1).fillna(0).to_numpy()
    counts_FR = pd.concat([of_run.count() for of_run in facts], axis=1).fillna(0).to_numpy()
    generator = np.random.default_rng(0)
    drawn_SF = generator.multinomial(len(sums_FR), np.full(len(sums_FR), 1 / len(sums_FR)), RESAMPLES)
    asked_SR = drawn_SF @ counts_FR
    means_SR = np.where(asked_SR > 0, drawn_SF @ sums_FR / asked_SR.clip(1), of_runs.to_numpy())
    shares_R = 1 / len(of_models) / of_runs.groupby(level=0).transform("size").to_numpy()
    chosen_SR = generator.choice(len(of_runs), means_SR.shape, p=shares_R)
    resampled_S = np.take_along_axis(means_SR, chosen_SR, axis=1).mean(axis=1)
    low, high = np.quantile(resampled_S, [(1 - level) / 2, (1 + level) / 2])
    half = _over_facts(of_items, level) if few else 0.0
    return mean, min(float(low), mean - half), max(float(high), mean + half)


def _over_facts(difference: pd.Series, level: float) -> float:
    """Half-width of Student's interval of the mean over items, with facts as independent clusters."""
    facts = difference.groupby(level=0)
    residuals, number = facts.sum() - difference.mean() * facts.count(), facts.ngroups
    if number < 2:
        raise ValueError("an interval over facts needs items about two facts or more")
    error = (number / (number - 1) * residuals.pow(2).sum()) ** 0.5 / len(difference)
    return t_quantile((1 + level) / 2, number - 1) * error


def paired_difference(
    answers: pd.DataFrame, objective: str, method: str, against: str, metric: str
) -> dict[str, float] | None:
    """`method` minus `against` on the items of a metric, over runs that have both: the mean difference and the
    half-width of its interval. None if no run has both."""
    sides = answers[
        (answers.objective == objective) & (answers.metric == metric) & answers.method.isin([method, against])
    ]
    scores = sides.pivot(index=[*RUN_OF_OBJECTIVE, "fact", "id"], columns="method", values="score").dropna()
    if not {method, against} <= set(scores) or scores.empty:
        return None
    of_items = (scores[method] - scores[against]).droplevel("id")
    runs = dict(list(of_items.groupby(level=RUN_OF_OBJECTIVE)))
    differences = [of_run.droplevel(RUN_OF_OBJECTIVE) for of_run in runs.values()]
    models = [model for model, *_ in runs]
    mean, low, high = paired_interval(differences, models)
    return dict(difference=mean, half_width=(high - low) / 2)


def paired_table(answers: pd.DataFrame, runs: pd.DataFrame) -> Table:
    """Every method compared with AGAINST, item by item.

    For letter questions, two columns reveal a model that always says A: the share of the most frequent letter on forget
    questions, and forget accuracy with reordered choices. The original and the retrained model then have rows too, as a
    model that knows and one that never knew."""
    measured = set(answers.metric.unique())
    metrics = [metric for metric in MEASURES if metric in measured]
    letters = bool(answers.chosen.notna().any())
    columns = [f"Δ {names.metric(metric).heading}" for metric in metrics]
    table = Table(columns + ["letter", "shuffled"] * letters)
    objectives = [NO_OBJECTIVE] * letters + names.objectives_of(answers)
    for (kind, group), objective in product(apart(answers), objectives):
        entries = []
        of_objective = group[group.objective == objective]
        of_metrics = dict(list(of_objective.groupby("metric")))
        of_group = runs[runs.model.isin(group.model.unique()) & runs.benchmark.isin(group.benchmark.unique())]
        for method in names.ordered(of_objective.method.unique()):
            cells = []
            for metric in metrics:
                asked = None if method == AGAINST else of_metrics.get(metric)
                found = None if asked is None else paired_difference(asked, objective, method, AGAINST, metric)
                cells.append(Cell(MISSING) if found is None else _cell(**found, decimals=2 if letters else 1))
            if letters:
                of_method = of_group[(of_group.objective == objective) & (of_group.method == method)]
                cells += _letter_bias(of_objective[of_objective.method == method], of_method)
            entries.append((names.method_label(method), cells, []))
        if entries:
            table.blocks.append((", ".join(filter(None, [kind, names.objective_label(objective)])), entries))
    items, facts = ("questions", "facts") if letters else ("items", "items")
    explained = [f"{names.metric(metric).heading}: {names.metric(metric).note}" for metric in metrics]
    table.notes = [
        f"Differences to {names.method_label(AGAINST).lower()} on the same test {items}; ± half of a 95 % interval:"
        f" Student's over base models from three on, below a bootstrap of {RESAMPLES} resamples of runs and of {facts}"
        f" (with fewer than {MANY_FACTS} {facts}, at least Student's over them). The interval of a single run tells two"
        " models apart, not two methods.",
        "letter: share of the letter given most on forget questions; shuffled: FA with choices reordered."
        if letters
        else f"{'; '.join(explained)}.",
    ]
    return table


def _cell(difference: float, half_width: float, decimals: int) -> Cell:
    return Cell(signed(with_half_width(difference, half_width, decimals)), difference, half_width)


def _letter_bias(answers: pd.DataFrame, runs: pd.DataFrame) -> list[Cell]:
    of_runs = answers[answers.metric == "forget_accuracy"].groupby([*RUN_OF_OBJECTIVE, "chosen"])
    chosen = of_runs.size().groupby(RUN_OF_OBJECTIVE)
    share = float((chosen.max() / chosen.sum()).mean())
    shuffled = runs.loc[runs.metric == "prompt_choice_shuffle", "value"].mean()
    return [Cell(f"{share:.2f}", share), Cell(MISSING if np.isnan(shuffled) else f"{shuffled:.2f}", shuffled)]
