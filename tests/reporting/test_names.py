"""Everything has a name and a look, which everyone can tell from others."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from gripmoe.config import fingerprint, training
from gripmoe.config.methods import method_table
from gripmoe.reporting import RENDERING, names
from gripmoe.reporting.runs import apart


def test_models_of_one_name_differ_by_their_seed_and_facts_alone():
    catalogue = yaml.safe_load((Path(__file__).parents[2] / "workflow/config/models.yaml").read_text(encoding="utf-8"))
    own = {"embedded": {"seed", "world_seed", "retrained", "base", "shipped"}}

    def described(row):
        kept = {key: row[key] for key in row.keys() - own.get(row["source"], {"seed", "retrained"})}
        if row["source"] == "finetuned":  # of models and articles of one name
            kept["base"] = names.model_label(row["base"].removesuffix("_retrained"))
            kept["benchmark"] = names.benchmark_label(row["benchmark"])
        return kept

    for (first, a), (second, b) in combinations(catalogue.items(), 2):
        alike = [described(row) for row in (a, b)]
        of_one_name = names.model_label(first) == names.model_label(second)
        known = names._matching("models", first) and names._matching("models", second)
        assert (alike[0] == alike[1]) == of_one_name or not known, (first, second)


def test_known_methods_come_first_and_sweeps_stay_out():
    listed = ["zeta", "frozen_router", "alpha", "frozen_router", "unconstrained", "early_eps_1em3"]
    assert names.ordered(listed) == ["unconstrained", "frozen_router", "alpha", "zeta"]
    assert not names.ordered(name for name in method_table() if re.search(r"_eps_\dem\d$", name))
    assert names.ordered(["anchored_eps_1em3"]) == ["anchored_eps_1em3"], "of one's own, which no other table has"
    assert [names.objective_label(name) for name in ("rmu", "my_loss", "none")] == ["RMU", "my loss", ""]


def test_benchmarks_of_one_label_are_pooled_unless_one_base_model_has_both():
    """Then they have other settings, and their runs would count twice."""
    of_two = pd.DataFrame([("tiny_a", "wmdp_tiny"), ("tiny_c", "wmdp_tiny_1")], columns=["model", "benchmark"])
    of_one = pd.DataFrame([("tiny_a", "wmdp_tiny"), ("tiny_a", "wmdp_tiny_erasure")], columns=["model", "benchmark"])
    assert [name for name, _ in apart(of_two)] == [""]
    assert {name: len(rows) for name, rows in apart(of_one)} == {"wmdp_tiny": 1, "wmdp_tiny_erasure": 1}


def test_every_objective_has_a_label_in_the_packages_order():
    assert [*names.OBJECTIVES] == [*training.OBJECTIVES]


def test_what_draws_is_no_code_that_trains(monkeypatch):
    """Or every table and figure would be drawn again after a change of the training code."""
    asked, definitions = set(), fingerprint._definitions
    monkeypatch.setattr(fingerprint, "_definitions", lambda module: asked.add(module) or definitions(module))
    fingerprint.code_fingerprint(*RENDERING)
    packages = {module.split(".")[1] for module in asked}
    assert "reporting" in packages and not packages & {"attacks", "constraints", "moe", "training"}


def test_every_method_has_a_name_and_a_look_of_its_own():
    looks = {(names.colour(method), names.line_style(method)) for method in names.COLOURS}
    assert len(looks) == len(names.COLOURS)
    of_colours = {names.colour(method): names.look_of(method)["marker"] for method in names.COLOURS}
    assert len(set(of_colours.values())) == min(len(of_colours), len(names.MARKERS))
    assert not {name for name in method_table() if "_eps_" not in name} - set(names.METHODS), "without a name"


# As who lacks a cone sees linear RGB (Machado, Oliveira and Fernandes, 2009), and XYZ of it.
VISION = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]


def seen(colour, vision):
    """CIELAB coordinates: a distance of 2 is just noticed."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array(XYZ) @ np.clip(np.array(VISION[vision]) @ linear, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
def test_colours_can_be_told_apart_by_everyone(vision):
    def distance(first, second):
        return np.linalg.norm(seen(first, vision) - seen(second, vision))

    assert distance("#000000", "#ffffff") == pytest.approx(100, abs=0.1)
    olive, orange = "#b8a800", "#e69f00"  # a pair that looks different to most
    assert (distance(olive, orange) > 25) if vision == "all cones" else (distance(olive, orange) < 7)
    distances = {pair: distance(*pair) for pair in combinations(set(names.COLOURS.values()), 2)}
    assert min(distances.values()) > 15, min(distances, key=distances.get)
