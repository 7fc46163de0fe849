"""A method erases if its bound says so under every attack, beside the retrained models of its base models."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.reporting.erasure_goals import _of_every_attack, erasure_frontier, goals, goals_table, meets
from gripmoe.reporting.runs import KEYS
from gripmoe.reporting.uncertainty import LEAST

MODELS = "abcd"
WORLD = {"a": "letters", "b": "letters", "c": "letters_1", "d": "letters_2"}
WEAK, STRONG = "restored_router_all", "relearned_after_20"


def runs(method, objective="gd", seed=0, **metrics):
    """Rows of the tidy table: of each metric a value per base model, or one for all."""
    rows = [
        dict(zip(KEYS, (model, WORLD[model], objective, method, seed), strict=True), metric=metric, value=value)
        for metric, values in metrics.items()
        for model, value in zip(MODELS, np.broadcast_to(values, len(MODELS)), strict=True)
    ]
    return pd.DataFrame(rows)


ORIGINAL = runs("original", NO_OBJECTIVE, **{"retain_accuracy": [0.8, 0.8, 1.0, 1.0], WEAK: 0.9, STRONG: 1.0})
RETRAINED = runs(
    "retrained",
    NO_OBJECTIVE,
    **{"retain_accuracy": 0.8, "tokens": [1e6, 2e6, 2e6, 2e6], WEAK: 0.2, STRONG: [0.1, 0.2, 0.3, 0.4]},
)
KEPT = {"retain_accuracy": [0.76, 0.76, 1.0, 1.0], "routing_stability": 0.95, "tokens": [1e5, 1e5, 1e5, 1e5]}
UNLEARNED = runs("anchored", **KEPT, **{WEAK: 0.21, STRONG: [0.2, 0.2, 0.4, 0.4]})
TABLE = pd.concat([ORIGINAL, RETRAINED, UNLEARNED])


def of(method, table=TABLE):
    return goals(table).set_index("method").loc[method]


def without(table, model, metric=None, method=None):
    chosen = table.model == model
    chosen &= (table.metric == metric) if metric else True
    return table[~(chosen & ((table.method == method) if method else True))]


def test_measures_are_means_over_base_models_each_beside_its_own_original_and_retrained_model():
    """Excesses are 0.1, 0, 0.1 and 0; unpaired values would spread otherwise."""
    found = of("anchored")
    assert found.excess == pytest.approx(0.05) and found.attack == STRONG and found.base_models == 4
    spread = np.std([0.1, 0.0, 0.1, 0.0], ddof=1) / 2
    assert found.excess_half_width == pytest.approx(stats.t.ppf(0.975, 3) * spread)
    assert found.excess_bound == pytest.approx(0.05 + stats.t.ppf(0.95, 3) * spread)
    assert found.robustness == pytest.approx(1 - 0.05 / 0.75)
    assert found.retained == pytest.approx(np.mean([0.95, 0.95, 1.0, 1.0]))
    of_retained = np.std([0.95, 0.95, 1.0, 1.0], ddof=1) / 2
    assert found.retained_bound == pytest.approx(found.retained - stats.t.ppf(0.95, 3) * of_retained)
    assert found.compute == pytest.approx((0.1 + 3 * 0.05) / 4)
    assert of("retrained").excess == 0 and of("retrained").robustness == 1, "the retrained model is its own floor"


def test_the_bound_is_the_highest_of_any_attack():
    """The mean is highest under one attack. Another one has a lower mean that varies more between base models."""
    attacked = {WEAK: [0.0, 0.1, 0.3, 0.5], STRONG: [0.13, 0.23, 0.33, 0.43]}
    table = pd.concat([ORIGINAL, RETRAINED, runs("anchored", **KEPT, **attacked)])
    found = of("anchored", table)
    assert found.excess == pytest.approx(0.03) and found.attack == STRONG and not meets(found, "excess")
    varied = np.array([-0.2, -0.1, 0.1, 0.3])
    assert found.excess_bound == pytest.approx(varied.mean() + stats.t.ppf(0.95, 3) * varied.std(ddof=1) / 2)
    assert found.excess_p == pytest.approx(stats.ttest_1samp(varied, 0.05, alternative="less").pvalue)
    steady = of("anchored", table[table.metric != WEAK])
    assert steady.excess_bound == pytest.approx(0.03) and meets(steady, "excess")


def test_worlds_of_facts_may_be_the_units():
    table = pd.concat([ORIGINAL, RETRAINED, runs("anchored", **KEPT, **{STRONG: [0.1, 0.4, 0.4, 0.5]})])
    worlds = np.array([0.1, 0.1, 0.1])  # models a and b, with 0 and 0.2, know the same facts
    found = of("anchored", table[table.metric != WEAK])
    assert found.excess_bound_of_fact_sets == pytest.approx(worlds.mean()) and found.excess_bound > 0.15


def test_the_seeds_of_a_base_model_are_averaged():
    later = [
        runs("anchored", seed=seed, **KEPT, **{WEAK: 0.21, STRONG: [0.2, 0.2, 0.4, 0.4 + seed]}) for seed in (1, 2)
    ]
    found = of("anchored", pd.concat([TABLE, *later]))
    assert found.excess == pytest.approx((0.1 + 0.0 + 0.1 + 1.0) / 4) and found.base_models == 4


def test_two_base_models_give_no_bound():
    table = TABLE[TABLE.model.isin(["a", "b"])]
    found = of("anchored", table)
    assert LEAST == 3 and found.excess == pytest.approx(0.05)
    assert found[["excess_bound", "excess_p", "retained_bound"]].isna().all()
    assert not any(cell.best for _, cells, _ in goals_table(table).rows for cell in cells)


def test_a_base_model_without_its_retrained_model_is_left_out():
    found = of("anchored", without(TABLE, "a", method="retrained"))
    assert found.base_models == 3 and found.excess == pytest.approx(0.1 / 3)


def test_an_attack_that_was_not_made_on_every_base_model_leaves_the_bound_unknown():
    """The control: without this attack on any base model, the bound is that of the other one."""
    found = of("anchored", without(TABLE, "a", metric=STRONG, method="anchored"))
    assert np.isnan(found.excess_bound) and np.isnan(found.excess_p) and not meets(found, "excess")
    assert of("anchored", TABLE[TABLE.metric != STRONG]).excess_bound == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("metric", "method", "unknown"),
    [
        ("tokens", "retrained", ["compute"]),
        (None, "original", ["retained", "robustness"]),
        ("routing_stability", "anchored", ["routing"]),
    ],
)
def test_a_measure_that_a_base_model_lacks_is_unknown(metric, method, unknown):
    found = of("anchored", without(TABLE, "b", metric, method))
    assert [
        name for name in ("excess", "retained", "routing", "compute", "robustness") if np.isnan(found[name])
    ] == sorted(unknown, key=["excess", "retained", "routing", "compute", "robustness"].index)
    assert not any(meets(found, name) for name in unknown if name != "robustness")


def test_what_was_not_measured_says_nothing():
    alone = TABLE[TABLE.method != "retrained"]
    assert goals(alone).empty and not goals_table(alone).blocks
    assert "was unlearned" in erasure_frontier(goals(alone)).texts[0].get_text()
    neither = TABLE[(TABLE.method != "original") & (TABLE.metric != "tokens")]
    assert "were measured" in erasure_frontier(goals(neither)).texts[0].get_text()


def test_the_share_of_the_original_may_come_from_another_table():
    share = runs("anchored", retain_accuracy_share=[0.9, 0.9, 0.8, 0.8])
    found = of("anchored", pd.concat([TABLE[TABLE.method != "original"], share]))
    assert found.retained == pytest.approx(0.85)


def test_runs_without_retain_accuracy_have_no_such_measure():
    found = of("anchored", TABLE[TABLE.metric != "retain_accuracy"])
    assert pd.isna(found.retained) and not meets(found, "retained") and found.excess == of("anchored").excess


def test_the_table_marks_the_goals_that_are_shown_to_be_met():
    missed = runs("anchored", reached=[1, 1, 1, 0])
    table = goals_table(pd.concat([TABLE, missed]))
    ((label, cells, _),) = table.rows
    assert label == "Anchored (ours) *" and any(text.startswith("* has not forgotten") for text in table.legend)
    marked = {heading: cell.best for heading, cell in zip(table.columns, cells, strict=True)}
    assert marked == {"excess": False, "retained": False, "RS": True, "compute": True, "attack": False}
    texts = [cell.text for cell in cells]
    assert texts == ["0.05 (≤ 0.118)", "0.98 (≥ 0.941)", "0.95 (≥ 0.950)", "0.06 (≤ 0.092)", "learn 20"]


def test_a_method_at_the_margin_is_seldom_said_to_erase_and_one_below_it_mostly():
    """The bound is below an excess of 0.05 in at most 5 % of experiments in which it is 0.05 under each attack. The
    control, the highest mean, is below it much more often when there is one attack."""
    generator, said, control, trials = np.random.default_rng(0), {}, 0, 60
    index = pd.Index(list(MODELS), name="benchmark")
    for attacks, excess in ((1, 0.05), (3, 0.05), (3, -0.05)):
        said[attacks, excess] = 0
        for _ in range(trials):
            values = excess + 0.03 * generator.normal(size=(len(MODELS), attacks))
            found = _of_every_attack(pd.DataFrame(values, index))
            assert meets(found, "excess") == (found["excess_p"] <= 0.05)
            said[attacks, excess] += meets(found, "excess")
            control += (attacks == 1) * (values.mean() <= 0.05)
    assert said[1, 0.05] <= 0.1 * trials and said[3, 0.05] <= 0.1 * trials
    assert control >= 0.4 * trials and said[3, -0.05] >= 0.9 * trials


def test_the_frontier_has_a_point_per_method_and_objective_inside_its_axes():
    far = UNLEARNED.assign(objective="npo", method="sam", value=UNLEARNED.value.where(UNLEARNED.metric != STRONG, 0.99))
    panels = erasure_frontier(goals(pd.concat([TABLE, far]))).axes
    assert [axes.get_title() for axes in panels] == ["GD", "NPO", "", ""]
    drawn = [
        [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if len(line.get_xdata()) == 1]
        for axes in panels
    ]
    control = (1.0, 1.0)
    assert sorted(drawn[0]) == [pytest.approx((0.0625, 1 - 0.05 / 0.75)), pytest.approx(control)]
    assert sorted(drawn[1]) == [pytest.approx((0.0625, 1 - 0.74 / 0.75)), pytest.approx(control)]
    assert sorted(drawn[2]) == [pytest.approx((0.0, 0.9)), pytest.approx((0.05, 0.975))]
    assert drawn[3][-1] == pytest.approx((0.74, 0.975))
    for axes, points in zip(panels, drawn, strict=True):
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        assert all(left < x < right and low < y < high for x, y in points)


def test_the_labels_of_a_frontier_of_one_objective_are_inside_the_picture():
    figure = erasure_frontier(goals(TABLE))
    figure.canvas.draw()
    boxes = [axes.xaxis.label.get_window_extent() for axes in figure.axes]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)


def test_the_frontier_leaves_out_what_no_objective_unlearned():
    edited = UNLEARNED.assign(objective=NO_OBJECTIVE, method="remove_experts")
    figure = erasure_frontier(goals(pd.concat([TABLE, edited])))
    assert "Experts removed" not in str([text.get_text() for text in figure.legends[0].get_texts()])
    alone = goals(pd.concat([ORIGINAL, RETRAINED, edited]))
    assert "not measured" in erasure_frontier(alone).texts[0].get_text()
