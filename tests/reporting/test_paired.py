"""Paired comparisons: by hand, and against what ignoring the pairing or the runs would say."""

import numpy as np
import pandas as pd
import pytest

from gripmoe.reporting.paired import paired_difference, paired_interval, paired_table
from gripmoe.reporting.runs import COLUMNS


def series(values, per_fact=2):
    return pd.Series(values, index=[f"fact {i // per_fact}" for i in range(len(values))])


def test_runs_are_the_outer_level():
    up, down = series([1] * 60), series([-1] * 60)
    mean, low, high = paired_interval([up, down, up, down])
    assert mean == 0.0 and low <= -0.4 and high >= 0.4, "runs disagree: more questions do not help"
    mixed = series([1, -1] * 60, per_fact=1)
    _, low, high = paired_interval([mixed] * 4)
    assert -0.2 < low < high < 0.2, "the control: the same answers, spread over questions"


def covered(facts, together):
    """In how many of 200 samples the interval of three runs of one base model contains the true mean, 0. All runs ask
    about the same facts, or the control: each about facts of its own."""
    random, hits = np.random.default_rng(0), 0
    for _ in range(200):
        of_facts, runs = random.normal(0, 0.3, (3, facts)), []
        for run in range(3):
            asked = 0 if together else run
            names = [f"{asked} {number}" for number in range(facts)]
            runs.append(pd.Series(of_facts[asked] + random.normal(0, 0.05, facts), names))
        _, low, high = paired_interval(runs)
        hits += low <= 0 <= high
    return hits / 200


@pytest.mark.parametrize("facts", [8, 60])
def test_runs_that_ask_about_the_same_facts_share_their_error(facts):
    """If each run drew facts of its own, 0.8 of the intervals would contain the mean."""
    assert covered(facts, together=True) >= 0.9
    assert covered(facts, together=False) >= 0.9


def test_two_base_models_have_the_same_weight():
    up, down = series([1] * 60), series([0] * 60)
    mean, low, high = paired_interval([up, down, down, down], ["a", "b", "b", "b"])
    assert mean == 0.5 and low < 0.2 and high > 0.8
    mean, _, _ = paired_interval([up, down, down, down])
    assert mean == 0.25, "the control: runs of one base model"


def test_from_three_base_models_on_they_are_the_units():
    """Seeds of one base model are no further evidence."""
    shares = {"a": 0.2, "b": 0.3, "c": 0.4}
    runs = {model: series([1] * round(100 * share) + [0] * round(100 - 100 * share)) for model, share in shares.items()}
    mean, low, high = paired_interval([*runs.values()] * 4, [*runs] * 4)
    half = 4.302653 * 0.1 / 3**0.5
    assert (mean, low, high) == pytest.approx((0.3, 0.3 - half, 0.3 + half), abs=1e-5)


def test_a_single_fact_has_no_interval():
    one = series([1, 0], per_fact=2)
    assert paired_interval([one]) == (0.5, 0.5, 0.5), "tables of tiny benchmarks are drawn all the same"
    with pytest.raises(ValueError, match="two facts"):
        paired_interval([one], level=0.999)


def test_questions_about_one_fact_count_as_one():
    random = np.random.default_rng(0)
    by_fact = np.repeat(random.choice([-1, 1], size=30), 10)
    _, low, high = paired_interval([series(by_fact, per_fact=10)])
    _, narrow_low, narrow_high = paired_interval([series(by_fact, per_fact=1)])
    assert high - low > 2 * (narrow_high - narrow_low)


def answers(method, seed, correct, metric="forget_accuracy", letters=True, objective="gd"):
    rows = [
        dict(id=f"q{i}", fact=f"f{i // 2}", metric=metric, chosen=int(i % 4 == 0) if letters else None, score=float(c))
        for i, c in enumerate(correct)
    ]
    keys = dict(model="m", benchmark="b", objective=objective, method=method, seed=seed)
    return [{**keys, **row} for row in rows]


def test_methods_are_compared_on_the_runs_that_both_have():
    rows = [row for seed in (0, 1) for row in answers("unconstrained", seed, [True] * 8)]
    rows += answers("anchored", 1, [False] * 8)
    found = paired_difference(pd.DataFrame(rows), "gd", "anchored", "unconstrained", "forget_accuracy")
    assert found["difference"] == -1.0
    assert paired_difference(pd.DataFrame(rows), "gd", "ptc", "unconstrained", "forget_accuracy") is None
    table = paired_table(pd.DataFrame(rows), pd.DataFrame(columns=COLUMNS))
    shown = {label: [cell.text for cell in cells] for label, cells, _ in table.rows}
    assert table.columns == ["Δ FA", "letter", "shuffled"], "retain questions were not asked"
    assert shown["Anchored (ours)"][0] == "-1.00 ± 0.00"
    assert shown["Unconstrained"][:2] == ["–", "0.75"]


def test_letter_bias_has_a_floor_in_the_models_that_trained_nothing():
    rows = answers("original", 0, [True] * 8, objective="none") + answers("unconstrained", 0, [False] * 8)
    shuffled = [("m", "b", "none", "original", 0, "prompt_choice_shuffle", 0.9)]
    shuffled += [("other", "b", "none", "original", 0, "prompt_choice_shuffle", 0.1)]
    (name, entries), (after, _) = paired_table(pd.DataFrame(rows), pd.DataFrame(shuffled, columns=COLUMNS)).blocks
    ((label, cells, _),) = entries
    assert (name, label, after) == ("", "Before unlearning", "GD")
    assert [cell.text for cell in cells] == ["–", "0.75", "0.90"]


def test_news_is_compared_on_its_own_measures():
    rows = answers("unconstrained", 0, [80.0] * 8, "knowmem_retain", letters=False)
    rows += answers("anchored", 0, [90.0] * 6 + [60.0] * 2, "knowmem_retain", letters=False)
    rows += answers("unconstrained", 0, [20.0] * 8, "verbmem", letters=False)
    rows += answers("anchored", 0, [20.0] * 8, "verbmem", letters=False)
    table = paired_table(pd.DataFrame(rows), pd.DataFrame(columns=COLUMNS))
    shown = {label: [cell.text for cell in cells] for label, cells, _ in table.rows}
    assert table.columns == ["Δ C1", "Δ C4"] and table.notes[1].startswith("C1: ")
    assert shown["Anchored (ours)"][0] == "+0.0 ± 0.0" and shown["Anchored (ours)"][1].startswith("+2.5 ± ")


def test_methods_and_objectives_that_nobody_has_named_are_compared():
    rows = answers("unconstrained", 0, [True] * 8, objective="my_loss")
    rows += answers("my_method", 0, [False] * 8, objective="my_loss")
    rows += answers("my_eps_small", 0, [False] * 8, objective="my_loss")
    rows += answers("late_eps_1em3", 0, [False] * 8, objective="my_loss")  # a sweep has a table of its own
    ((name, entries),) = paired_table(pd.DataFrame(rows), pd.DataFrame(columns=COLUMNS)).blocks
    assert (name, [label for label, _, _ in entries]) == ("my loss", ["Unconstrained", "my eps small", "my method"])
