"""Intervals over base models cover what they should, and those over runs do not."""

import numpy as np
import pandas as pd
import pytest

from gripmoe.reporting.uncertainty import complete_cells, holm, interval, p_above, units, units_of_table

MODELS, OBJECTIVES, SEEDS = 6, 4, 2


def values(of_models, noise, objectives=OBJECTIVES):
    """A difference per base model, objective and seed."""
    index = pd.MultiIndex.from_product(
        [[f"m{i}" for i in range(len(of_models))], [f"o{i}" for i in range(objectives)], range(SEEDS)],
        names=["model", "objective", "seed"],
    )
    return pd.Series(np.repeat(of_models, objectives * SEEDS) + noise[: len(index)], index)


def test_the_interval_over_base_models_covers_the_mean_of_all_base_models_and_that_over_runs_does_not():
    generator, covered = np.random.default_rng(0), {"models": 0, "runs": 0}
    for _ in range(400):
        runs = values(generator.normal(size=MODELS), 0.5 * generator.normal(size=MODELS * OBJECTIVES * SEEDS))
        for name, sample in (("models", units(runs)), ("runs", runs)):
            mean, half = interval(sample)
            covered[name] += abs(mean) <= half
    assert 0.92 <= covered["models"] / 400 <= 0.98
    assert covered["runs"] / 400 < 0.7


def test_base_models_are_compared_under_the_same_objectives():
    """Objectives differ by far more than base models; a plain mean would take the one for the other."""
    effects = np.tile(np.repeat([0.0, 1.0, 2.0, 5.0], SEEDS), 3)
    whole = values(np.array([0.1, 0.2, 0.3]), effects)
    part = whole.drop([("m0", "o3", 0), ("m0", "o3", 1), ("m1", "o0", 0)])
    of_three = whole[whole.index.get_level_values("objective") != "o3"]
    pd.testing.assert_series_equal(units(part), units(of_three))
    assert part.groupby("model").mean()["m0"] < part.groupby("model").mean()["m1"] - 0.5
    lacks_all = part[
        (part.index.get_level_values("model") != "m0") | (part.index.get_level_values("objective") == "o3")
    ]
    assert set(units(lacks_all).index) == {"m1", "m2"}, "a base model without any of them is left out"
    diagonal = whole.loc[[("m0", "o0", 0), ("m1", "o1", 0)]]
    assert units(diagonal).tolist() == pytest.approx([0.1]), "none in common: the first objective"


def test_a_missing_run_leaves_out_its_base_model_and_no_objective():
    whole = values(np.arange(6) / 10, np.tile(np.repeat([0.0, 1.0, 2.0, 5.0], SEEDS), 6))
    part = whole.drop([("m0", "o3", 0), ("m0", "o3", 1)])
    assert set(units(part).index) == {"m1", "m2", "m3", "m4", "m5"}
    pd.testing.assert_series_equal(units(part), units(whole)[1:])
    assert len(complete_cells(part)) == 5 * OBJECTIVES * SEEDS
    barely = whole[(whole.index.get_level_values("objective") != "o3") | (whole.index.get_level_values("model") < "m3")]
    assert len(units(barely)) == 6, "an objective that few base models have is left out"


def test_the_runs_of_a_single_base_model_are_the_units():
    one, two = values(np.array([0.1]), np.zeros(100)), values(np.array([0.1, 0.2]), np.zeros(100))
    assert len(units(one)) == OBJECTIVES * SEEDS and units(two).tolist() == pytest.approx([0.1, 0.2])
    tidy = values(np.array([0.1, 0.2, 0.3]), np.zeros(100)).rename("value").reset_index()
    assert units_of_table(tidy).tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_p_is_below_the_level_where_the_interval_misses_the_limit():
    sample = pd.Series([0.2, 0.3, 0.35, 0.5])
    mean, half = interval(sample)
    assert p_above(sample, mean - half - 1e-6) < 0.05 < p_above(sample, mean - half + 1e-6)
    assert p_above(sample, 1.0) == 1.0 and p_above(pd.Series([0.5] * 3), 0.4) < 1e-9


def test_holm_by_hand():
    levels = holm(pd.Series({"a": 0.04, "b": 0.001, "c": 0.02}))
    assert levels.to_dict() == pytest.approx({"b": 0.05 / 3, "c": 0.025, "a": 0.05})
    stopped = holm(pd.Series({"a": 0.04, "b": 0.001, "c": 0.03}))
    assert stopped["a"] == stopped["c"] == 0.025, "after the first that is above its level, none is below"


def test_holm_keeps_the_rate_of_a_family_and_no_correction_does_not():
    generator = np.random.default_rng(0)
    drawn = [pd.Series(generator.uniform(size=8)) for _ in range(400)]
    corrected = np.mean([(p <= holm(p)[p.index]).any() for p in drawn])
    assert corrected <= 0.08 < 0.25 < np.mean([(p <= 0.05).any() for p in drawn])
