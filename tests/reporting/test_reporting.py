"""Tables and figures from synthetic cells: numbers by hand, marks computed, the paper's values apart."""

import re
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.image import imread
from PIL import Image

import gripmoe.reporting
from gripmoe.files import file_digest, write_csv, write_json, write_yaml
from gripmoe.reporting import labels
from gripmoe.reporting.attacks import attack_matrix, load_attacks
from gripmoe.reporting.collect import (
    COLUMNS,
    at_equal_forgetting,
    collect_cells,
    computed_with,
    load_histories,
    load_runs,
    of_kind,
)
from gripmoe.reporting.comparison import comparison, paper_values
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
from gripmoe.reporting.paired import load_answers
from gripmoe.reporting.tables import Cell, Table, as_frame, as_latex, as_tex, draw, interval, save, without_zeros

COMPARISONS = Path(gripmoe.reporting.__file__).with_name("comparisons.yaml")


def synthetic():
    """Two seeds of three methods; `frozen_router` has not reached its target in one of them."""
    rows = []
    values = {
        "unconstrained": (0.26, 0.70, 0.40),
        "frozen_router": (0.30, 0.99, 0.80),
        "expert_specific_paper": (0.25, 0.90, 0.75),
    }
    for method, (fa, ra, rs) in values.items():
        for seed in (0, 1):
            metrics = {
                "forget_accuracy": fa,
                "retain_accuracy": ra + 0.02 * seed,
                "routing_stability": rs,
                "recovery_rate": 0.1,
                "reached": float(not (method == "frozen_router" and seed == 1)),
                "diverged": 0.0,
                "forget_accuracy_target": 0.27,
                "corrected_after": 0.0,
                "num_experts": 16.0,
                "top_k": 4.0,
                **{f"routing_stability_layer_{layer}": rs - 0.1 * layer + 0.02 * seed for layer in range(3)},
            }
            rows += [("tiny_a", "wmdp_tiny", "rmu", method, seed, name, value) for name, value in metrics.items()]
    rows += [("tiny_a", "wmdp_tiny", "none", "original", 0, "forget_accuracy", 0.98)]
    return pd.DataFrame(rows, columns=COLUMNS)


def row(table, label):
    for _, entries in table.blocks:
        for name, measured, paper in entries:
            if name.startswith(label):
                return (
                    name,
                    dict(zip(table.columns, measured, strict=True)),
                    dict(zip(table.paper_columns, paper, strict=True)),
                )
    raise AssertionError(label)


def test_interval_by_hand():
    mean, half = interval(pd.Series([1.0, 2.0, 3.0]))
    assert mean == 2.0 and half == pytest.approx(4.302653 / np.sqrt(3), rel=1e-5)
    assert interval(pd.Series([0.2, 0.6])) == pytest.approx((0.4, 0.2))
    assert interval(pd.Series([0.5])) == (0.5, None)


def test_measured_and_paper_stand_apart():
    table = comparison(synthetic(), "main_results")
    _, measured, paper = row(table, "Unconstrained")
    assert measured["RA"].value == pytest.approx(0.71) and measured["RA"].half_width == pytest.approx(0.01)
    assert (paper["FA"].value, paper["RA"].value, paper["RS"].value) == (0.26, 0.35, 0.43)
    frame = as_frame(table)
    assert {"RA", "RA ±", "paper: RA"} <= set(frame.columns)


def test_base_models_of_different_kinds_are_not_pooled():
    runs = synthetic()
    other = runs.assign(model="olmoe", value=runs.value.where(runs.metric != "retain_accuracy", 0.1))
    alone, again = (comparison(runs, "main_results"), runs.assign(model="tiny_b"))
    tables = {
        name: comparison(pd.concat([runs, more]), "main_results") for name, more in (("kinds", other), ("seeds", again))
    }
    blocks = {name: [block for block, _ in table.blocks] for name, table in tables.items()}
    assert blocks["seeds"] == [block for block, _ in alone.blocks] == ["", "RMU"]
    assert blocks["kinds"] == ["Tiny Qwen3-MoE", "Tiny Qwen3-MoE, RMU", "OLMoE-1B-7B", "OLMoE-1B-7B, RMU"]
    found = [
        row(Table(tables["kinds"].columns, tables["kinds"].paper_columns, [block]), "Unconstrained")
        for block in tables["kinds"].blocks[1::2]
    ]
    assert [measured["RA"].value for _, measured, _ in found] == pytest.approx([0.71, 0.1]), "not .405"
    assert [paper["RS"].value for _, _, paper in found] == [0.43, None], "the paper's beside one of them"
    paper = pd.concat([runs, runs.assign(model="qwen3_30b_a3b")])
    *_, (_, entries) = comparison(paper, "main_results").blocks
    assert [cell.value for cell in entries[0][2]] == [0.26, 0.35, 0.43], "beside its own model"


def test_benchmarks_are_not_pooled():
    runs = pd.concat([synthetic(), synthetic().assign(benchmark="wmdp_tiny_narrow")])
    assert [block for block, _ in comparison(runs, "main_results").blocks][1::2] == [
        "wmdp_tiny, RMU",
        "wmdp_tiny_narrow, RMU",
    ]


def test_models_of_one_name_differ_by_their_seed_alone():
    catalogue = yaml.safe_load((Path(__file__).parents[2] / "workflow/config/models.yaml").read_text(encoding="utf-8"))
    for (first, a), (second, b) in combinations(catalogue.items(), 2):
        alike = [{key: value for key, value in model.items() if key not in ("seed", "oracle")} for model in (a, b)]
        of_one_name = labels.model_label(first) == labels.model_label(second)
        known = first in labels.MODELS and second in labels.MODELS
        assert (alike[0] == alike[1]) == of_one_name or not known, (first, second)


def test_what_was_not_measured_is_missing_not_filled():
    table = comparison(synthetic(), "main_results")
    _, measured, paper = row(table, "Before unlearning")
    assert measured["FA"].value == 0.98 and measured["RS"].text == "–" and measured["RS"].value is None
    assert all(cell.value is None for cell in paper.values())


def test_counts_that_do_not_vary_say_so():
    runs = synthetic()
    steps = runs[runs.metric == "forget_accuracy"].assign(metric="steps", value=130.0)
    table = comparison(pd.concat([runs, steps]), "cost_and_memory")
    texts = [cells[0].text for _, entries in table.blocks for _, cells, _ in entries]
    assert set(texts) == {"130 ± 0", "–"}


def test_no_negative_zero():
    runs = synthetic()
    runs.loc[runs.metric == "recovery_rate", "value"] = -0.001
    assert row(comparison(runs, "main_results"), "Unconstrained")[1]["recovery"].text == "0.00 ± .00"


def test_best_is_computed_among_runs_that_forgot():
    table = comparison(synthetic(), "main_results")
    name, frozen, _ = row(table, "Frozen router")
    assert name.endswith("*") and not frozen["RA"].best, "the highest, but it has not reached the target"
    assert row(table, "Method A, paper")[1]["RA"].best
    assert not row(table, "Unconstrained")[1]["RA"].best
    changed = synthetic()
    changed.loc[changed.metric == "reached", "value"] = 1.0
    assert not any(
        cell["recovery"].best for _, cell, _ in [row(comparison(changed, "main_results"), "Unconstrained")]
    ), "all equal"
    assert row(comparison(changed, "main_results"), "Frozen router")[1]["RA"].best


def test_forgetting_undone_by_a_correction_is_marked():
    runs = synthetic()
    chosen = runs.method == "unconstrained"
    runs.loc[chosen & (runs.metric == "corrected_after"), "value"] = 1.0
    assert row(comparison(runs, "main_results"), "Unconstrained")[0].endswith("Unconstrained ‡")
    runs.loc[chosen & (runs.metric == "forget_accuracy"), "value"] = 0.92
    runs.loc[chosen & (runs.metric == "retain_accuracy"), "value"] = 1.0
    name, cells, _ = row(comparison(runs, "main_results"), "Unconstrained")
    assert name.endswith("* ‡") and not cells["RA"].best, "the highest, but it has not forgotten"


def test_diverged_runs_are_marked():
    runs = synthetic()
    runs.loc[(runs.method == "unconstrained") & (runs.metric == "diverged"), "value"] = 1.0
    assert "†" in row(comparison(runs, "main_results"), "Unconstrained")[0]


def test_paper_values_are_the_papers():
    published = paper_values("main_results")
    assert published["rmu", "unconstrained", "routing_stability"] == 0.43
    assert published["gd", "ptc_paper", "retain_accuracy"] == 0.55
    assert len(published) == 17 * 3


def test_every_table_is_complete_and_its_columns_have_names():
    tables = yaml.safe_load(COMPARISONS.read_text(encoding="utf-8"))
    assert len(tables) >= 9
    for name, table in tables.items():
        assert set(table["measured"]) | set(table["paper"]) <= set(labels.METRICS), name
        for block in table["blocks"]:
            for row in block["rows"]:
                assert ("paper" in row) == ("line" in row), (name, row)
                assert len(row.get("paper", table["paper"])) == len(table["paper"]), (name, row)
                assert row["method"] in labels.METHODS or "label" in row, (name, row)


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


def test_the_papers_values_stand_as_it_prints_them():
    published = comparison(pd.DataFrame(news("unconstrained") + news("ptc_paper"), columns=COLUMNS), "muse_results")
    texts = {
        name: [cell.text for cell in row(published, name)[2].values()] for name in ("Unconstrained", "Method B, paper")
    }
    assert texts["Unconstrained"] == ["0.05", "0.03", "-25.6", "4.31", "0.26"]
    assert texts["Method B, paper"] == ["0.01", "0.00", "-30.4", "9.42", "1.00"]
    letters = comparison(synthetic(), "constraint_ablation")
    assert [cell.text for cell in row(letters, "Full null space")[2].values()] == ["0.38", "0.68", "0.96", "1.67×"]
    few = news("unconstrained", privleak=0.42)
    few += news("unconstrained", seed=1, privleak=1.0)
    assert (
        row(comparison(pd.DataFrame(few, columns=COLUMNS), "muse_results"), "Unconstrained")[1]["C3"].text
        == "0.7 ± 0.3"
    )


def test_unknown_table():
    with pytest.raises(ValueError, match="no table 'magic'; one of main_results"):
        comparison(synthetic(), "magic")


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


def test_every_method_has_a_name_and_a_look_of_its_own():
    assert set(labels.COLOURS) <= set(labels.METHODS) and labels.DASHED <= set(labels.COLOURS)
    looks = {(labels.colour(method), labels.line_style(method)) for method in labels.COLOURS}
    assert len(looks) == len(labels.COLOURS)
    assert len({labels.marker(method) for method in labels.COLOURS}) == len(set(labels.COLOURS.values()))


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
    distances = {pair: distance(*pair) for pair in combinations(set(labels.COLOURS.values()), 2)}
    assert min(distances.values()) > 15, min(distances, key=distances.get)


def test_collecting_cells(tmp_path):
    cell = tmp_path / "cell"
    key = {"model": "m", "benchmark_name": "b", "objective": "none", "method_name": "ptc", "seed": 3}
    settings = {"benchmark": {"target": {"forget_accuracy": 0.27}}, "method": {"corrects": "unconstrained"}}
    settings["training"] = {"learning_rate": 0.1, "betas": [0.9, 0.99], "objective": {"alpha": 2.0}}
    write_yaml(cell / "run.yaml", key | settings)
    write_json(cell / "evaluation.json", {"forget_accuracy": 0.25})
    write_json(cell / "attack.json", {"recovery_rate": float("nan")})
    write_json(
        cell / "checkpoint.json", {"weights": "abc", "status": "not_reached", "steps": 40, "accepted_layer_0": True}
    )
    write_json(cell / "history.json", [{"step": 10, "forget_accuracy": 0.5}])
    asked = {"id": "q/0", "fact": "q", "exposure": "forget", "chosen": 2, "correct": 1, "wording": "seen"}
    others = [asked | {"id": f"{fact}/{n}", "fact": fact, "correct": n} for fact in "rs" for n in (0, 1)]
    write_csv(cell / "questions.csv", [asked, *others])
    write_csv(cell / "attack_questions.csv", [{"id": "q/0", "forget_accuracy": 0.0, "noisy_routing": 1.0}])
    tables = (tmp_path / f"{name}_w.csv" for name in ("runs", "histories", "answers", "attacks"))
    collect_cells([cell], *tables)
    (attacked,) = load_attacks(tmp_path / "runs_w.csv").to_dict("records")
    assert (attacked["method"], attacked["fact"], attacked["noisy_routing"]) == ("ptc", "q", 1.0)
    answer, *_ = load_answers(tmp_path / "runs_w.csv").to_dict("records")
    assert (answer["method"], answer["fact"], answer["chosen"], answer["score"]) == ("ptc", "q", 2, 1)
    assert answer["metric"] == "forget_accuracy"
    history = load_histories(tmp_path / "runs_w.csv")
    assert history[["method", "step", "metric", "value"]].values.tolist() == [["ptc", 10, "forget_accuracy", 0.5]]
    (tmp_path / "runs_w.csv").rename(tmp_path / "runs.csv")
    runs = load_runs(tmp_path / "runs.csv")
    assert set(runs.objective) == {"none"}
    values = runs.set_index("metric").value
    assert values["forget_accuracy_half_width"] == pytest.approx(1.96 / 6), "over facts: 1, .5, .5"
    assert values["forget_accuracy"] == 0.25 and values["steps"] == 40 and values["accepted_layer_0"] == 1.0
    assert (values["reached"], values["diverged"]) == (0.0, 0.0) and np.isnan(values["recovery_rate"])
    assert (values["forget_accuracy_target"], values["corrected_after"]) == (0.27, 1.0)
    assert "weights" not in values and (values["setting_learning_rate"], values["setting_alpha"]) == (0.1, 2.0)
    (tmp_path / "bad.csv").write_text("model,value\nm,1\n")
    with pytest.raises(ValueError, match="no column benchmark"):
        load_runs(tmp_path / "bad.csv")


def test_a_whole_run_costs_what_it_needs_before_its_first_step_too(tmp_path):
    benchmark = tmp_path / "m" / "b"

    def cell(method, constraint, **outcome):
        folder = benchmark / "gd" / method / "0"
        run = {"model": "m", "benchmark_name": "b", "objective": "gd", "method_name": method, "seed": 0}
        settings = {"benchmark": {"target": {"forget_accuracy": 0.27}}}
        write_yaml(folder / "run.yaml", run | settings | {"method": {"corrects": None, "constraint": constraint}})
        write_json(folder / "checkpoint.json", {"weights": "w", "status": "reached"} | outcome)
        for name in ("evaluation", "attack"):
            write_json(folder / f"{name}.json", {"forget_accuracy": 0.2})
        for name in ("questions", "attack_questions"):
            (folder / f"{name}.csv").write_text("id\n")
        return folder

    write_json(benchmark / "bases" / "expert_specific.json", {"basis_megabytes": 1.0})
    for stem, seconds in (("routing", 4), ("bases/expert_specific", 6)):
        write_json(benchmark / f"{stem}.provenance.json", {"seconds": seconds})
    folders = [
        cell("unconstrained", "none", steps=10, seconds_per_step=2.0, plain_seconds_per_step=2.0),
        cell("frozen_router", "frozen", steps=5, seconds_per_step=9.0, plain_seconds_per_step=9.0),  # beside other work
        cell("expert_specific", "null_space", steps=10, seconds_per_step=2.5, plain_seconds_per_step=2.0),
        cell("anchored", "anchor", steps=30, seconds_per_step=2.0, plain_seconds_per_step=2.0),
        cell("ptc", None, steps=10, correction_seconds=1.0, seconds_per_step=2.0, plain_seconds_per_step=2.0),
    ]
    collect_cells(folders, *(tmp_path / f"{name}_w.csv" for name in ("runs", "histories", "answers", "attacks")))
    runs = load_runs(tmp_path / "runs_w.csv")
    found = runs[runs.metric == "whole_time_ratio"].set_index("method").value.to_dict()
    assert found == dict(
        unconstrained=1.0, frozen_router=0.5, expert_specific=(4 + 6 + 25) / 20, anchored=64 / 20, ptc=25 / 20
    )
    assert runs[runs.metric == "auc_zlib"].value.isna().sum() == len(folders), "asked of all, known of none"
    cell("unconstrained", "none", steps=0, seconds_per_step=2.0, plain_seconds_per_step=2.0)  # had forgotten before
    collect_cells(folders, *(tmp_path / f"{name}_w.csv" for name in ("runs", "histories", "answers", "attacks")))
    assert "whole_time_ratio" not in set(load_runs(tmp_path / "runs_w.csv").metric)


def test_what_cannot_be_measured_is_told_from_what_was_not():
    runs = pd.concat(
        [synthetic(), synthetic().query("metric == 'recovery_rate'").assign(metric="auc_zlib", value=np.nan)]
    )
    table = comparison(runs, "attack_controls")
    cells = row(table, "Unconstrained")[1]
    assert (cells["zlib"].text, cells["loss"].text) == ("n/a", "–")
    assert "n/a: no statements that no model has seen" in table.notes[-1] and "dense" not in table.notes[-1]


def test_runs_that_answer_by_chance_are_marked_and_never_best():
    runs = synthetic()
    assert row(comparison(runs, "main_results"), "Method A, paper")[0] == "Method A, paper"
    destroyed = (runs.method == "expert_specific_paper") & (runs.metric == "retain_accuracy") & (runs.seed == 1)
    runs.loc[destroyed, "value"] = 0.26
    runs.loc[(runs.method == "expert_specific_paper") & (runs.metric == "recovery_rate"), "value"] = -0.2
    runs.loc[runs.metric == "reached", "value"] = 1.0
    table = comparison(runs, "main_results")
    name, cells, _ = row(table, "Method A, paper")
    assert name.endswith(" §") and not cells["recovery"].best and "§ collapsed" in table.notes[-1]


def test_equal_forgetting_by_hand():
    history = [
        {"step": 0, "forget_accuracy": 0.9, "retain_accuracy": 1.0},
        {"step": 10, "forget_accuracy": 0.5, "retain_accuracy": 0.8},
        {"step": 20, "forget_accuracy": 0.1, "retain_accuracy": 0.4},
        {"step": 30, "forget_accuracy": 0.3, "retain_accuracy": 0.2},
    ]

    def at(target):
        return at_equal_forgetting(history, {"forget_accuracy": target})

    assert at(0.2) == {"retain_accuracy_at_target": pytest.approx(0.5)}
    assert at(0.5) == {"retain_accuracy_at_target": pytest.approx(0.8)}
    assert at(0.05) == at_equal_forgetting(history, {}) == at_equal_forgetting(history, {"verbmem": 50.0}) == {}


def test_news_is_compared_where_the_last_of_its_targets_is_met():
    names = ("step", "verbmem", "knowmem_forget", "knowmem_retain")
    history = [dict(zip(names, row, strict=True)) for row in ((0, 90, 60, 80), (5, 10, 40, 60), (10, 0, 20, 40))]
    found = at_equal_forgetting(history, {"verbmem": 28.0, "knowmem_forget": 25.0})
    assert found == {"knowmem_retain_at_target": pytest.approx(45.0)}, "three quarters of the second interval"
    found = at_equal_forgetting(history, {"verbmem": 50.0, "knowmem_forget": 55.0})
    assert found == {"knowmem_retain_at_target": pytest.approx(70.0)}, "C2 was met after a quarter, C1 after half"


def test_a_run_that_jumped_past_its_target_is_marked():
    runs = synthetic()
    far = (runs.method == "expert_specific_paper") & (runs.metric == "forget_accuracy") & (runs.seed == 1)

    def marked(value, half_width=None):
        changed = runs.assign(value=runs.value.mask(far, value))
        if half_width:
            widths = changed[changed.metric == "forget_accuracy"].assign(
                metric="forget_accuracy_half_width", value=half_width
            )
            changed = pd.concat([changed, widths])
        table = comparison(changed, "main_results")
        name, *_ = row(table, "Method A, paper")
        assert ("¶" in name) == ("¶ overshot" in table.notes[-1])
        return name.endswith(" ¶")

    assert marked(0.2) and not marked(0.23), "of a record without intervals: .05 below .27"
    assert marked(0.2, 0.06) and not marked(0.2, 0.08)
    rows = news("unconstrained", verbmem=2.0, knowmem_forget=2.0) + news("anchored", verbmem=2.0, knowmem_forget=14.0)
    table = comparison(pd.DataFrame(rows, columns=COLUMNS), "muse_results")
    assert row(table, "Unconstrained")[0].endswith(" ¶") and row(table, "Anchored")[0] == "Anchored (ours)", "C2 stops"


def test_short_numbers_lose_the_zero_before_the_point_and_no_other():
    assert without_zeros("100.0 ± 0.05, -0.25, 30.4, 0.125") == "100.0 ± .05, -.25, 30.4, .125"
    assert without_zeros("30.4 ± 0.4") == "30.4 ± 0.4", "a per cent"


def news(method, objective="gd", seed=0, **metrics):
    known = {"verbmem": 25.0, "knowmem_forget": 10.0, "privleak": -60.0, "knowmem_retain": 50.0, "corrected_after": 0.0}
    known |= {"routing_stability": 0.6, "reached": 1.0, "diverged": 0.0} | metrics
    known |= {"verbmem_target": 28.0, "knowmem_forget_target": 15.0}
    return [("tiny_news", "muse_tiny", objective, method, seed, name, value) for name, value in known.items()]


def test_news_has_marks_and_best_values_of_its_own():
    rows = news("unconstrained") + news("anchored", privleak=20.0, knowmem_retain=80.0)
    rows += news("ptc", verbmem=96.0, corrected_after=1.0, privleak=0.0, knowmem_retain=88.0)
    runs = pd.concat([synthetic(), pd.DataFrame(rows, columns=COLUMNS)])
    table = comparison(of_kind(runs, "news"), "muse_results")
    assert all("Frozen" not in label for _, entries in table.blocks for label, _, _ in entries), "letters stay out"
    name, cells, _ = row(table, "Method B, sound")
    assert name.endswith("* ‡") and not cells["C4"].best and not cells["C3"].best, "it recites the articles again"
    _, cells, _ = row(table, "Anchored")
    assert cells["C3"].best and cells["C4"].best and not cells["C1"].best, "nearest to zero; C1 is matched by design"
    assert cells["C4"].text == "80.0" and cells["RS"].text == "0.60"
    assert not of_kind(runs, "letters").metric.isin(["verbmem"]).any()


def test_what_counts_as_forgotten_on_news_comes_from_the_oracle(tmp_path):
    def cell(method, **metrics):
        folder = tmp_path / method
        run = {"model": "m", "benchmark_name": "n", "objective": "none", "method_name": method, "seed": 0}
        settings = {"benchmark": {"target": {"points_above_reference": 5}}, "method": {"corrects": None}}
        write_yaml(folder / "run.yaml", run | settings)
        write_json(folder / "evaluation.json", metrics)
        write_json(folder / "attack.json", {})
        write_csv(folder / "questions.csv", [{"criterion": "verbmem", "id": "0", "score": 1.0}])
        write_csv(folder / "attack_questions.csv", [{"id": "0", "forced_verbmem": 2.0}])
        return folder

    folders = [
        cell("original", verbmem=100.0, knowmem_forget=65.0, knowmem_retain=80.0),
        cell("retain_only", verbmem=22.0, knowmem_forget=12.0, knowmem_retain=90.0),
        cell("ptc", verbmem=60.0, knowmem_forget=30.0, knowmem_retain=40.0),
    ]
    collect_cells(folders, *(tmp_path / f"{name}_n.csv" for name in ("runs", "histories", "answers", "attacks")))
    values = load_runs(tmp_path / "runs_n.csv", "news").set_index(["method", "metric"]).value
    assert values["ptc", "verbmem_target"] == 27.0 and values["ptc", "knowmem_forget_target"] == 17.0
    assert values["ptc", "knowmem_retain_share"] == 0.5 and values["retain_only", "knowmem_retain_share"] == 1.125
    assert load_answers(tmp_path / "runs_n.csv").empty and load_runs(tmp_path / "runs_n.csv").empty
    assert load_answers(tmp_path / "runs_n.csv", "news").score.tolist() == [1.0] * 3
    attacked = load_attacks(tmp_path / "runs_n.csv")
    assert attacked[["verbmem", "forced_verbmem"]].values.tolist() == [[1.0, 2.0]] * 3, "beside what it adds to"


def test_a_table_without_any_of_the_papers_rows_has_no_columns_for_them():
    runs = synthetic()
    assert comparison(runs, "expert_forcing").paper_columns, "RMU is in the paper"
    alone = comparison(runs.assign(objective=runs.objective.replace("rmu", "gd")), "expert_forcing")
    assert alone.paper_columns == [] and all(not paper for _, entries in alone.blocks for _, _, paper in entries)


def test_what_attacks_return_of_forgotten_things_is_to_be_low_and_of_retained_ones_high():
    assert {"forced_forget_accuracy", "forced_verbmem", "restored_router_all"} <= labels.LOWER_IS_BETTER
    assert not [name for name in labels.LOWER_IS_BETTER if "retain" in name]
