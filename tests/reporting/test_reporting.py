"""Figures from synthetic cells: as they are drawn and written, and what figures and tables say of their source."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from invented_runs import synthetic
from PIL import Image

from gripmoe.io.files import file_digest, write_json
from gripmoe.reporting import names
from gripmoe.reporting.attacks import forcing_vulnerability
from gripmoe.reporting.collect import computed_with
from gripmoe.reporting.comparison import comparison
from gripmoe.reporting.figures import (
    PAPER_WIDTH,
    at_equal_levels,
    expected_overlap,
    forget_utility_tradeoff,
    house_style,
    legend_below,
    panels_of,
    random_floor,
    routing_stability_by_layer,
    save_figure,
    stability_by_layer,
)
from gripmoe.reporting.tables import save


def test_figures_show_what_nobody_has_named():
    runs = synthetic()
    runs = pd.concat([runs, runs.assign(objective=runs.objective.replace("rmu", "my_loss"))])
    figures = routing_stability_by_layer(runs), panels_of(runs)[0]
    titles = [[axes.get_title(loc="left") for axes in figure.axes] for figure in figures]
    assert titles == [["RMU", "my loss"]] * 2
    renamed = runs.assign(method=runs.method.replace("frozen_router", "my_method"))
    (first, _) = forcing_vulnerability(renamed).axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["my method", "Method A, paper", "Unconstrained"]
    plt.close("all")


def test_figures_draw_methods_of_ones_own():
    """The control: a method of the package without a colour is left out of figures without room for all."""
    for method, is_drawn in (("my_method", True), ("anchored_replay", False)):
        runs = synthetic()
        runs = runs.assign(method=runs.method.replace("frozen_router", method))
        (axes,) = routing_stability_by_layer(runs).axes
        label = names.method_label(method)
        assert (label in [text.get_text() for text in axes.texts]) == is_drawn
        (curve, *_) = forget_utility_tradeoff(runs.assign(step=1)).axes
        assert (label in curve.get_legend_handles_labels()[1]) == is_drawn
    assert names.colour("my_method") != names.colour("anchored_replay")
    assert len({tuple(names.look_of(f"mine_{number}").values()) for number in range(4)}) == 4
    plt.close("all")


def test_a_figure_of_two_methods_has_room_for_them():
    figure = forcing_vulnerability(synthetic()[lambda runs: runs.method.isin(["unconstrained", "frozen_router"])])
    (axes,) = figure.axes
    assert axes.get_window_extent().height > 0.35 * figure.bbox.height
    plt.close("all")


@pytest.mark.parametrize(("name", "columns"), [("short", 4), ("one method of a rather long name", 2)])
def test_a_legend_is_no_wider_than_its_figure(name, columns):
    with house_style():
        figure, axes = plt.subplots(figsize=(PAPER_WIDTH, 2))
        for number in range(13):
            axes.plot([], [], label=f"{name} {number}")
        legend_below(figure, axes)
    [legend] = figure.legends
    box = legend.get_window_extent()
    assert legend._ncols == columns and box.x0 >= 0 and box.x1 <= figure.bbox.width
    assert axes.get_window_extent().y0 > box.y1, "below the panel"
    plt.close(figure)


def test_pictures_do_not_change_without_a_reason(tmp_path):
    for name in ("a", "b"):
        save_figure(routing_stability_by_layer(synthetic()), tmp_path / name / "stability")
    for suffix in ("pdf", "png"):
        assert len({(tmp_path / name / f"stability.{suffix}").read_bytes() for name in ("a", "b")}) == 1


def test_tables_and_figures_name_their_source(tmp_path):
    runs, attacks = tmp_path / "runs_w.csv", tmp_path / "attacks_w.csv"
    runs.write_text("model,seed\nm,1\nm,0\n")
    attacks.write_text("model,seed\nm,0\n")
    step = {"device": "abacus", "python": "3.9", "packages": {"torch": "2.0", "snakemake": None}}
    write_json(tmp_path / "cell" / "evaluation.provenance.json", step)
    write_json(tmp_path / "cell" / "attack.provenance.json", step | {"device": "slide rule"})
    write_json(tmp_path / "runs_w.provenance.json", {"runs": computed_with([tmp_path / "cell"])})
    save(comparison(synthetic(), "main_results"), tmp_path / "main_results", runs, attacks)
    source = f"runs_w.csv sha256 {file_digest(runs)}; attacks_w.csv sha256 {file_digest(attacks)}; seeds 0 1; "
    source += "computed with device abacus, slide rule; computed with packages torch 2.0; computed with python 3.9; "
    source += "gripmoe code "
    assert (tmp_path / "main_results.tex").read_text().startswith(f"% {source}")
    for suffix in ("html", "md"):
        assert f"<!-- {source}" in (tmp_path / f"main_results.{suffix}").read_text()
    save_figure(routing_stability_by_layer(synthetic()), tmp_path / "stability", runs, attacks)
    with Image.open(tmp_path / "stability.png") as picture:
        assert picture.text["Source"].startswith(source) and "matplotlib 3" in picture.text["Source"]
    assert b"/Subject" in (tmp_path / "stability.pdf").read_bytes()
    save_figure(routing_stability_by_layer(synthetic()), tmp_path / "of_attacks", attacks)
    with Image.open(tmp_path / "of_attacks.png") as picture:
        assert picture.text["Source"].startswith(f"attacks_w.csv sha256 {file_digest(attacks)}; seeds 0; computed")


def test_kinds_of_base_models_have_panels_of_their_own():
    other = synthetic().assign(model="olmoe")
    other.loc[other.metric.str.startswith("routing_stability"), "value"] = 0.5
    runs = pd.concat([synthetic(), other])
    data = stability_by_layer(runs).set_index(["kind", "method", "layer"])["mean"]
    assert data["OLMoE-1B-7B", "unconstrained", 2] == 0.5 and data["Tiny Qwen3-MoE", "unconstrained", 2] < 0.22
    figure = routing_stability_by_layer(runs)
    assert [axes.get_title("left") for axes in figure.axes] == ["Tiny Qwen3-MoE, RMU", "OLMoE-1B-7B, RMU"]
    _, panels = panels_of(runs)
    assert [(objective, set(rows.model)) for _, objective, rows in panels] == [("rmu", {"tiny_a"}), ("rmu", {"olmoe"})]
    _, (alone,) = panels_of(pd.concat([synthetic(), synthetic().assign(model="tiny_b")]))
    assert set(alone[2].model) == {"tiny_a", "tiny_b"}, "instances of one kind"
    plt.close("all")


@pytest.mark.parametrize("shown", ["nothing unlearned", "no colour", "a dense model too", "a kind of baselines alone"])
def test_figures_of_whatever_runs_there_are(shown):
    runs = synthetic()
    if shown == "nothing unlearned":
        runs = runs.assign(objective="none", method="original")
    elif shown == "no colour":
        runs = runs.assign(method="mine")
    elif shown == "a dense model too":
        dense = runs[~runs.metric.str.startswith("routing")].assign(model="tiny_dense")
        runs = pd.concat([runs, dense])
    else:
        runs = pd.concat([runs[runs.method == "original"].assign(model="tiny_dense"), runs])
    drawn = [routing_stability_by_layer(runs), forcing_vulnerability(runs)]
    drawn.append(forget_utility_tradeoff(runs.assign(step=1)))
    assert all(figure.axes or figure.texts for figure in drawn)


def test_a_run_that_comes_back_is_followed_where_it_first_falls_to_a_level():
    """Between the check before and the first one at the level, not between two checks of which a third lies higher."""
    run = pd.DataFrame({"step": range(4), "fa": [0.9, 0.5, 0.6, 0.4], "ra": [0.9, 0.8, 0.7, 0.5]})
    levels, line = at_equal_levels([run], "fa", "ra")
    at = dict(zip(levels.round(6), line, strict=True))
    assert at[0.9] == pytest.approx(0.9) and at[0.4] == pytest.approx(0.5)
    assert np.interp(0.45, levels, line) == pytest.approx(0.55, abs=0.01), "a quarter of the way from 0.4 to 0.6"
    assert np.interp(0.7, levels, line) == pytest.approx(0.85, abs=0.01)


def test_layers_by_hand():
    data = stability_by_layer(synthetic())
    line = data[(data.method == "unconstrained") & (data.layer == 2)].iloc[0]
    assert line["mean"] == pytest.approx(0.21) and line.least == pytest.approx(0.20) and line.runs == 2


@pytest.mark.parametrize("num_experts, top_k", [(16, 4), (60, 4), (128, 8)])
def test_floor_of_random_sets_against_draws(num_experts, top_k):
    rng = np.random.default_rng(0)
    pairs = [[set(rng.choice(num_experts, top_k, replace=False)) for _ in range(2)] for _ in range(20000)]
    drawn = np.mean([len(a & b) / len(a | b) for a, b in pairs])
    assert expected_overlap(num_experts, top_k) == pytest.approx(drawn, abs=0.002)


def test_floor_is_read_from_the_runs():
    assert random_floor(synthetic()) == expected_overlap(16, 4)
