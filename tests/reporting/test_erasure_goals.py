"""A method erases if its bound says so under every attack, beside the retrained models of its base models."""

import numpy as np
import pandas as pd
import pytest

from gripmoe.config.grid import NO_OBJECTIVE
from gripmoe.reporting.collect import KEYS
from gripmoe.reporting.erasure import ATTACKS
from gripmoe.reporting.erasure_goals import erasure_frontier, goals, goals_table, meets

MODELS = "abcd"
WEAK, STRONG = "restored_router_all", "relearned_after_20"


def runs(method, objective="gd", seed=0, **metrics):
    """Rows of the tidy table: of each metric a value per base model, or one for all."""
    rows = [
        dict(zip(KEYS, (model, "letters", objective, method, seed), strict=True), metric=metric, value=value)
        for metric, values in metrics.items()
        for model, value in zip(MODELS, np.broadcast_to(values, len(MODELS)), strict=True)
    ]
    return pd.DataFrame(rows)


ORIGINAL = runs("original", NO_OBJECTIVE, **{"retain_accuracy": 0.8, WEAK: 0.9, STRONG: 1.0})
RETRAINED = runs(
    "retrained", NO_OBJECTIVE, **{"retain_accuracy": 0.8, "tokens": 2e6, WEAK: 0.2, STRONG: [0.1, 0.2, 0.3, 0.4]}
)
KEPT = {"retain_accuracy": [0.76, 0.76, 0.8, 0.8], "routing_stability": 0.95, "tokens": 1e5}
UNLEARNED = runs("anchored", **KEPT, **{WEAK: 0.21, STRONG: [0.2, 0.2, 0.4, 0.4]})
TABLE = pd.concat([ORIGINAL, RETRAINED, UNLEARNED])


def of(method, table=TABLE):
    return goals(table).set_index("method").loc[method]


def test_the_excess_is_a_mean_over_base_models_each_beside_its_own_retrained_model():
    found = of("anchored")
    assert found.excess == pytest.approx((0.1 + 0.0 + 0.1 + 0.0) / 4) and found.attack == STRONG
    assert found.robustness == pytest.approx(1 - 0.05 / 0.75)
    assert found.attacked == pytest.approx(0.3)
    assert (found.retained, found.compute) == pytest.approx((0.975, 0.05))
    assert of("retrained").excess == 0 and of("retrained").robustness == 1, "the retrained model is its own floor"


def test_the_bound_is_that_of_the_attack_that_leaves_most_room():
    """The mean is highest under one attack. Another one has a lower mean that varies more between base models."""
    attacked = {WEAK: [0.0, 0.1, 0.3, 0.5], STRONG: [0.13, 0.23, 0.33, 0.43]}
    table = pd.concat([ORIGINAL, RETRAINED, runs("anchored", **KEPT, **attacked)])
    found = of("anchored", table)
    assert found.excess == pytest.approx(0.03) and found.attack == WEAK
    assert not meets(found, "excess")
    steady = of("anchored", table[table.metric != WEAK])
    assert steady.excess_bound == pytest.approx(0.03) and meets(steady, "excess")


def test_seeds_are_no_base_models():
    again = pd.concat([TABLE, *(UNLEARNED.assign(seed=seed) for seed in (1, 2))])
    pd.testing.assert_series_equal(of("anchored", again), of("anchored"))


def test_two_base_models_give_no_bound():
    table = TABLE[TABLE.model.isin(["a", "b"])]
    found = of("anchored", table)
    assert found.excess == pytest.approx(0.05) and np.isnan(found.excess_bound)
    assert not any(cell.best for _, cells, _ in goals_table(table).rows for cell in cells)


def test_what_was_not_measured_says_nothing():
    assert goals(TABLE[TABLE.method != "retrained"]).empty
    assert not goals_table(TABLE[TABLE.method != "retrained"]).blocks
    found = of("anchored", TABLE[TABLE.method != "original"])
    assert np.isnan(found.retained) and np.isnan(found.robustness) and not meets(found, "retained")
    without = TABLE[~((TABLE.metric == STRONG) & (TABLE.model == "a") & (TABLE.method == "anchored"))]
    assert of("anchored", without).attack == WEAK, "an attack counts if it was made on every base model"


def test_the_table_marks_the_goals_that_are_shown_to_be_met():
    table = goals_table(TABLE)
    ((label, cells, _),) = table.rows
    marked = {heading: cell.best for heading, cell in zip(table.columns, cells, strict=True)}
    assert marked == {"excess": False, "retained": False, "RS": True, "compute": True, "attack": False}
    assert cells[0].text.startswith("0.05 (≤ 0.1") and cells[3].text == "0.05 (≤ 0.05)"


def test_a_method_at_the_margin_is_seldom_said_to_erase():
    """Excess 0.05 in truth under each attack. The bound is below it in at most 5 % of experiments. The control, the
    highest mean, is below it much more often when there is one attack."""
    generator, said, control, trials = np.random.default_rng(0), {1: 0, 5: 0}, 0, 100
    for attacks in said:
        names = ATTACKS[:attacks]
        floor = runs("retrained", NO_OBJECTIVE, retain_accuracy=0.8, **dict.fromkeys(names, 0.25))
        for _ in range(trials):
            found = {name: 0.3 + 0.03 * generator.normal(size=len(MODELS)) for name in names}
            row = of("anchored", pd.concat([floor, ORIGINAL, runs("anchored", retain_accuracy=0.8, **found)]))
            assert meets(row, "excess") == (row.excess_p <= 0.05)
            said[attacks] += meets(row, "excess")
            control += (attacks == 1) * (row.excess <= 0.05)
    assert said[1] / trials <= 0.08 and said[5] / trials <= 0.08 and control / trials >= 0.4


def test_the_frontier_has_a_point_per_method_and_objective():
    under_npo = UNLEARNED.assign(objective="npo", method="sam")
    panels = erasure_frontier(goals(pd.concat([TABLE, under_npo]))).axes
    assert [axes.get_title() for axes in panels] == ["GD", "NPO", "", ""]
    drawn = [
        [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if len(line.get_xdata()) == 1]
        for axes in panels
    ]
    method, control = (0.05, 1 - 0.05 / 0.75), (1.0, 1.0)
    assert sorted(drawn[0]) == sorted(drawn[1]) == [pytest.approx(method), pytest.approx(control)]
    assert sorted(drawn[2]) == [pytest.approx((0.25, 1.0)), pytest.approx((0.3, 0.975))]


def test_the_frontier_leaves_out_what_no_objective_unlearned():
    edited = UNLEARNED.assign(objective=NO_OBJECTIVE, method="remove_experts")
    figure = erasure_frontier(goals(pd.concat([TABLE, edited])))
    assert "Experts removed" not in str([text.get_text() for text in figure.legends[0].get_texts()])
    alone = goals(pd.concat([ORIGINAL, RETRAINED, edited]))
    assert "not measured" in erasure_frontier(alone).texts[0].get_text()
