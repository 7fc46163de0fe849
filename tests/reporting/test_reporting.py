"""Tables and figures from synthetic cells: as they are drawn and written."""

import re
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import yaml
from invented_runs import COMPARISONS, synthetic
from matplotlib.image import imread
from PIL import Image

from gripmoe.files import file_digest, write_json
from gripmoe.reporting import labels
from gripmoe.reporting.attacks import attack_matrix, forcing_vulnerability
from gripmoe.reporting.collect import COLUMNS, computed_with
from gripmoe.reporting.comparison import comparison
from gripmoe.reporting.figures import (
    PAPER_WIDTH,
    expected_overlap,
    house_style,
    legend_below,
    panels_of,
    random_floor,
    routing_stability_by_layer,
    save_figure,
    stability_by_layer,
)
from gripmoe.reporting.tables import Cell, Table, as_frame, as_latex, as_tex, draw, interval, save, without_zeros


def test_interval_by_hand():
    mean, half = interval(pd.Series([1.0, 2.0, 3.0]))
    assert mean == 2.0 and half == pytest.approx(4.302653 / np.sqrt(3), rel=1e-5)
    assert interval(pd.Series([0.2, 0.6])) == pytest.approx((0.4, 0.2))
    assert interval(pd.Series([0.5])) == (0.5, None)


def test_figures_show_what_nobody_has_named():
    runs = synthetic()
    runs = pd.concat([runs, runs.assign(objective=runs.objective.replace("rmu", "my_loss"))])
    figures = routing_stability_by_layer(runs), panels_of(runs)[0]
    titles = [[axes.get_title(loc="left") for axes in figure.axes] for figure in figures]
    assert titles == [["RMU", "my loss"]] * 2
    names = runs.assign(method=runs.method.replace("frozen_router", "my_method"))
    (first, _) = forcing_vulnerability(names).axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["my method", "Method A, paper", "Unconstrained"]
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


@pytest.mark.parametrize("name", yaml.safe_load(COMPARISONS.read_text(encoding="utf-8")))
def test_no_two_texts_of_a_drawn_table_overlap(name):
    """With intervals everywhere, some below zero, every row marked, nothing missing; of a matrix each attack's cell."""
    spec = yaml.safe_load(COMPARISONS.read_text(encoding="utf-8"))[name]
    benchmark = "muse_tiny" if spec.get("kind") == "news" else "wmdp_tiny"
    marks = {"reached": 0.0, "forget_accuracy_target": 0.25}
    rows = [
        (entry.get("model", "tiny_a"), benchmark, entry.get("objective", block.get("objective")), entry["method"], seed)
        + (metric, (value - 0.6 * (number % 2)) * (1 + seed / 10))
        for block in spec["blocks"]
        for entry in block["rows"]
        for number, (metric, value) in enumerate((dict.fromkeys(spec["measured"], 0.277) | marks).items())
        for seed in (0, 1)
    ]
    runs = pd.DataFrame(rows, columns=COLUMNS)
    figure = draw(attack_matrix(runs, name=name) if spec.get("differences") else comparison(runs, name))
    figure.set_dpi(300)
    boxes = [(text.get_text(), text.get_window_extent()) for text in figure.axes[0].texts]
    assert len(boxes) >= len(spec["measured"])
    overlapping = [
        (first, second)
        for (first, a), (second, b) in combinations(boxes, 2)
        if min(a.x1, b.x1) > max(a.x0, b.x0) and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.3 * min(a.height, b.height)
    ]
    assert not overlapping
    width = figure.get_window_extent().width
    assert not [text for text, box in boxes if box.x0 < 0 or box.x1 > width], "and none is cut off"
    beside = [(a, b) for (_, a), (_, b) in combinations(boxes, 2) if min(a.y1, b.y1) > max(a.y0, b.y0)]
    assert min(max(b.x0 - a.x1, a.x0 - b.x1) for a, b in beside) > 0.03 * figure.dpi, "nor do they touch"
    assert not [text for text, _ in boxes if re.search(r"(?<![\w.])-[.\d]", text)], "a hyphen is no minus"
    plt.close(figure)


def test_all_formats_are_written(tmp_path):
    save(comparison(synthetic(), "main_results"), tmp_path / "main_results.csv")
    for suffix in ("csv", "tex", "pdf", "png"):
        assert (tmp_path / f"main_results.{suffix}").stat().st_size > 200
    assert imread(tmp_path / "main_results.png").std() > 0.01, "not an empty picture"
    assert pd.read_csv(tmp_path / "main_results.csv")["paper: RS"].notna().sum() == 5
    tex = as_latex(comparison(synthetic(), "main_results"))
    assert r"\textbf{" in tex and "±" not in tex and tex.count(r"\toprule") == 1


def test_latex_has_plain_signs_only():
    """What pdflatex takes: ASCII, escaped where it means something, math signs in math mode."""
    shown = " ".join([*labels.METHODS.values(), *labels.METRICS.values(), *labels.METRIC_NOTES.values()])
    shown += COMPARISONS.read_text(encoding="utf-8") + COMPARISONS.with_name("claims.yaml").read_text(encoding="utf-8")
    shown += "".join(Path(file).read_text(encoding="utf-8") for file in COMPARISONS.parent.glob("*.py"))
    shown += (COMPARISONS.parents[1] / "illustrations.py").read_text(encoding="utf-8")
    assert {"±", "µ", "Δ", "‡"} <= set(shown) and as_tex(shown).isascii()
    cells = [Cell("< .001", 0.0), Cell("-0.25 ± .05 %", -0.25, shade=1.0)]
    tex = as_latex(Table(["a_b & c", "µs"], [], [("", [("Row *", cells, [])])], ["* 1 < 2; † so"]))
    assert r"$<$ .001 & \cellcolor[HTML]{F5923E}$-$0.25 $\pm$ .05 \%" in tex and r"a\_b \& c & $\mu$s" in tex
    assert tex.endswith("\\end{tabular}\n\\par\\smallskip{\\footnotesize * 1 $<$ 2; $\\dagger$ so\\par}\n")
    for name in yaml.safe_load(COMPARISONS.read_text(encoding="utf-8")):
        tex = as_latex(comparison(synthetic(), name))
        assert tex.isascii() and tex.count("{") == tex.count("}") and tex.count("$") % 2 == 0


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
    write_json(tmp_path / "runs_w.provenance.json", {"cells": computed_with([tmp_path / "cell"])})
    save(comparison(synthetic(), "main_results"), tmp_path / "main_results", runs, attacks)
    source = f"runs_w.csv sha256 {file_digest(runs)}; attacks_w.csv sha256 {file_digest(attacks)}; seeds 0 1; "
    source += "computed with device abacus, slide rule; computed with packages torch 2.0; computed with python 3.9; "
    source += "gripmoe code "
    with Image.open(tmp_path / "main_results.png") as picture:
        assert picture.text["Source"].startswith(source) and "matplotlib 3" in picture.text["Source"]
    save(comparison(synthetic(), "main_results"), tmp_path / "of_attacks", attacks)
    with Image.open(tmp_path / "of_attacks.png") as picture:
        assert picture.text["Source"].startswith(f"attacks_w.csv sha256 {file_digest(attacks)}; seeds 0; computed")
    assert f"% {source}" in (tmp_path / "main_results.tex").read_text()
    assert b"/Subject" in (tmp_path / "main_results.pdf").read_bytes()


def test_headings_that_come_again_keep_their_numbers_in_the_csv():
    table = Table(["A", "p", "B", "p", "C"], [], [("", [("row", [Cell(str(i), i) for i in range(5)], [])])])
    assert as_frame(table).iloc[0][["A", "A: p", "B", "B: p", "C"]].tolist() == [0, 1, 2, 3, 4]


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


def test_short_numbers_lose_the_zero_before_the_point_and_no_other():
    assert without_zeros("100.0 ± 0.05, -0.25, 30.4, 0.125") == "100.0 ± .05, -.25, 30.4, .125"
    assert without_zeros("30.4 ± 0.4") == "30.4 ± 0.4", "a per cent"
