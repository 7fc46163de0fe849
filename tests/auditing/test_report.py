"""The report of an audit on answers made up for it: its intervals, and its charts."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from gripmoe.attacks.base import Found
from gripmoe.auditing.charts import charts_of
from gripmoe.auditing.report import AuditReport
from gripmoe.reporting.names import COLOURS
from gripmoe.reporting.paired import paired_interval

COUNT = 24


@pytest.fixture
def report():
    """Two questions about each fact. The original knows all, and the unlearned model, which knows none, answers half of
    them under forced sets."""
    asked = {"exposure": "forget", "subject": "ports", "question": "Which?", "choices": list("wxyz"), "answer": 0}
    questions = [{"id": f"q{number}", "fact": f"fact {number // 2}", **asked} for number in range(COUNT)]
    ids = [question["id"] for question in questions]
    half = [float(number % 4 < 2) for number in range(COUNT)]
    layers = {f"restored_router_layer_{layer}": [0.0] * COUNT for layer in range(2)}
    found = {
        "original": Found.over(ids, {"forget_accuracy": [1.0] * COUNT}, retain_accuracy=0.9),
        "unlearned": Found.over(ids, {"forget_accuracy": [0.0] * COUNT, "forced_forget_accuracy": half, **layers}),
        "retrained": Found.over(ids, {"forget_accuracy": [0.0] * COUNT, **layers}),
    }
    return AuditReport(found=found, questions=questions, absent={}, identity={}, minutes=0.0)


def test_equal_answers_are_no_certainty_in_the_tables_either(report):
    """As in the verdict, but within the range of an accuracy. The control: answers that differ."""
    frame = report.to_frame().set_index(["model", "measure"])
    wide = 1 - 0.025 ** (1 / (COUNT / 2))
    right, wrong, half = (
        frame.loc[key]
        for key in (
            ("original", "forget_accuracy"),
            ("unlearned", "forget_accuracy"),
            ("unlearned", "forced_forget_accuracy"),
        )
    )
    assert (right.value, right.low, right.high) == pytest.approx((1.0, 1.0 - wide, 1.0)) and wide > 0.2
    assert (wrong.value, wrong.low, wrong.high) == pytest.approx((0.0, 0.0, wide)) and wrong.n == COUNT
    scores = pd.Series(report.found["unlearned"].scores["forced_forget_accuracy"]).rename(report.facts)
    assert (half.value, half.low, half.high) == pytest.approx(paired_interval([scores])) and half.low < 0.3
    assert pd.isna(frame.loc[("original", "retain_accuracy")].low), "a measure without answers"
    shown = report.to_summary().set_index(["model", "measure"])
    assert shown.loc[("unlearned", "forget_accuracy")].high == wrong.high


@pytest.mark.parametrize("retained", [0.22, 0.9])
def test_a_model_that_answers_nothing_is_told(report, retained):
    """The verdict is on forgetting, which is then no merit."""
    report.found["unlearned"].metrics["retain_accuracy"] = retained
    assert ("little more than a guess" in str(report)) == (retained == 0.22)


def test_a_report_that_replaces_another_ones_says_so(report, tmp_path, capsys):
    report.found["unlearned"].metrics["retain_accuracy"] = 0.9
    for models in ("a", "a", "b"):
        replace(report, identity={"models": models}).save(tmp_path)
        assert ("replaces the report on other models" in capsys.readouterr().err) == (models == "b")


def test_models_have_the_colours_that_their_methods_have_elsewhere(report):
    charts = charts_of(report.to_frame(), report.verdict.returned)
    (lines,) = [figure for caption, figure in charts.items() if "one layer" in caption]
    found = {line.get_label().split(":")[0]: line.get_color() for line in lines.axes[0].lines}
    assert found == {"unlearned": COLOURS["unconstrained"], "retrained": COLOURS["retrained"]}
    plt.close("all")
