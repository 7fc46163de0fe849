"""Attacks made one after the other, and what is not made again."""

import pytest

from gripmoe.attacks import Found, by_item, highest
from gripmoe.attacks.suite import run_attacks
from gripmoe.files import read_json


def attacks_that_fail_at(broken: str, made: list[str]):
    def attack(name: str, value: float):
        def make() -> Found:
            if name == broken:
                raise KeyboardInterrupt
            made.append(name)
            return Found({f"{name}_metric": value}, {f"{name}_metric": {"z": value, name: 0.5}})

        return make

    return {name: attack(name, value) for name, value in [("forcing", 0.1), ("probes", float("nan")), ("noise", 1 / 3)]}


def test_an_interrupted_attack_goes_on_with_the_next_one(tmp_path):
    made = []
    state = tmp_path / "state.json"
    with pytest.raises(KeyboardInterrupt):
        run_attacks(attacks_that_fail_at("noise", made), state, {"model": "a"})
    assert made == ["forcing", "probes"]
    found = run_attacks(attacks_that_fail_at("", made), state, {"model": "a"})
    assert made == ["forcing", "probes", "noise"], "the first two are not made again"
    whole = run_attacks(attacks_that_fail_at("", made), tmp_path / "other.json", {"model": "a"})
    assert repr(found) == repr(whole), "in the same order too"
    assert found.metrics["noise_metric"] == 1 / 3
    rows = {row["id"]: row for row in by_item(found)}
    assert list(rows) == ["z", "forcing", "probes", "noise"] and rows["z"]["noise_metric"] == 1 / 3
    assert (rows["noise"]["noise_metric"], rows["noise"]["forcing_metric"]) == (0.5, "")


def test_found_is_the_mean_of_its_items_and_what_is_no_mean():
    found = Found.over(["a", "b"], {"noise": [True, 0.0]}, gain=0.1)
    assert found.metrics == {"noise": 0.5, "gain": 0.1} and found.scores == {"noise": {"a": 1.0, "b": 0.0}}
    with pytest.raises(ValueError, match="shorter"):
        Found.over(["a", "b"], {"noise": [1.0]})
    assert highest([[0.0, 1.0], [1.0, 1.0]]) == [1.0, 1.0]


def test_what_another_model_said_does_not_count(tmp_path):
    made = []
    state = tmp_path / "state.json"
    run_attacks(attacks_that_fail_at("", made), state, {"model": "a"})
    run_attacks(attacks_that_fail_at("", made), state, {"model": "b"})
    assert made == 2 * ["forcing", "probes", "noise"]
    assert read_json(state)["identity"] == {"model": "b"}
