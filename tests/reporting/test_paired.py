"""Paired comparisons: by hand, and against what ignoring the pairing or the runs would say."""

import numpy as np
import pandas as pd
import pytest

from gripmoe.reporting.paired import compared, mcnemar, paired_interval, paired_table


def test_mcnemar_by_hand():
    left = np.array([True] * 10 + [False] * 2 + [True] * 30)
    right = np.array([False] * 10 + [True] * 2 + [True] * 30)
    assert mcnemar(left, right) == pytest.approx(0.03857, abs=1e-5)  # 2 * P(Bin(12, .5) <= 2)
    assert mcnemar(left, left) == 1.0


def series(values, per_fact=2):
    return pd.Series(values, index=[f"fact {i // per_fact}" for i in range(len(values))])


def test_no_difference_has_no_interval():
    assert paired_interval([series([0] * 20), series([0] * 20)]) == (0.0, 0.0, 0.0)


def test_runs_are_the_outer_level():
    up, down = series([1] * 60), series([-1] * 60)
    mean, low, high = paired_interval([up, down, up, down])
    assert mean == 0.0 and low <= -0.4 and high >= 0.4, "runs disagree: more questions do not help"
    mixed = series([1, -1] * 60, per_fact=1)
    _, low, high = paired_interval([mixed] * 4)
    assert -0.2 < low < high < 0.2, "the control: the same answers, spread over questions"


def test_questions_about_one_fact_count_as_one():
    random = np.random.default_rng(0)
    by_fact = np.repeat(random.choice([-1, 1], size=30), 10)
    _, low, high = paired_interval([series(by_fact, per_fact=10)])
    _, narrow_low, narrow_high = paired_interval([series(by_fact, per_fact=1)])
    assert high - low > 2 * (narrow_high - narrow_low)


def answers(method, seed, correct):
    rows = [
        dict(id=f"q{i}", fact=f"f{i // 2}", exposure="forget", chosen=0 if i % 4 else 1, correct=int(c))
        for i, c in enumerate(correct)
    ]
    keys = dict(model="m", benchmark="b", objective="gd", method=method, seed=seed)
    return [{**keys, **row} for row in rows]


def test_methods_are_compared_on_the_runs_that_both_have():
    rows = [row for seed in (0, 1) for row in answers("unconstrained", seed, [True] * 8)]
    rows += answers("anchored", 1, [False] * 8)
    found = compared(pd.DataFrame(rows), "gd", "anchored", "unconstrained", "forget")
    assert (found["runs"], found["difference"], found["p"]) == (1, -1.0, pytest.approx(2 / 256))
    assert compared(pd.DataFrame(rows), "gd", "ptc", "unconstrained", "forget") is None
    table = paired_table(pd.DataFrame(rows), pd.DataFrame(columns=["objective", "method", "metric", "value"]))
    (_, entries), *_ = table.blocks
    shown = {label: [cell.text for cell in cells] for label, cells, _ in entries}
    assert shown["Anchored (ours)"][:3] == ["-1.00", "-1.00 .. -1.00", ".008"]
    assert shown["Unconstrained"][:3] == ["–", "–", "–"] and shown["Unconstrained"][6] == "0.75"
