"""The attack matrix: what an attack adds, question by question, with an interval; and figures of attacks."""

import pandas as pd
import pytest

from gripmoe.reporting.attacks import attack_matrix, component_restoration, forcing_vulnerability, relearning_curves
from gripmoe.reporting.runs import COLUMNS, KEYS

FACTS = 24


def runs_named(*methods, seeds=(0,)):
    return [("m", "b", "none" if method == "original" else "gd", method, seed) for method in methods for seed in seeds]


def attacked(run, own, forced):
    """Two questions on each fact, right according to functions of the fact's number."""
    rows = []
    for fact in range(FACTS):
        for order in range(2):
            scores = {"forget_accuracy": float(own(fact)), "forced_forget_accuracy": float(forced(fact))}
            rows.append(dict(zip(KEYS, run, strict=True)) | {"id": f"{fact}/{order}", "fact": f"f{fact}"} | scores)
    return rows


def runs_of(runs, **metrics):
    rows = [(*run, metric, value) for run in runs for metric, value in metrics.items()]
    return pd.DataFrame(rows, columns=COLUMNS)


def entries(table):
    return {label: dict(zip(table.columns, measured, strict=True)) for label, measured, _ in table.rows}


def test_what_an_attack_adds_is_paired_by_question():
    hides, swaps = runs_named("unconstrained", "frozen_router")
    items = attacked(hides, lambda f: f % 4 == 0, lambda f: True)
    items += attacked(swaps, lambda f: f % 2 == 0, lambda f: f % 2 == 1)  # as many right, others
    table = attack_matrix(runs_of([hides, swaps], forget_accuracy=0.9), pd.DataFrame(items))
    found = entries(table)
    hidden, swapped = (found[name]["+ forced"] for name in ("Unconstrained", "Frozen router"))
    assert hidden.text.startswith("0.75") and found["Unconstrained"]["FA"].value == 0.25, "not what runs say"
    assert swapped.value == 0.0 and swapped.half_width > hidden.half_width > 0.1
    assert hidden.shade == 1.0 and swapped.shade == 0.0 == found["Unconstrained"]["FA"].shade
    assert found["Unconstrained"]["+ noise"].text == "–", "not asked"


def test_news_has_two_measures_and_each_attack_adds_to_its_own():
    """What was attacked of one measure says nothing about the other, nor what was not attacked about what was."""
    unlearned, retrained = ("m", "b", "gd", "unconstrained", 0), ("m", "b", "none", "retrained", 0)
    items = []
    for cell, back in ((unlearned, 50.0), (retrained, 0.0)):
        for number in range(FACTS):
            item = dict(zip(KEYS, cell, strict=True)) | {"id": f"i{number}", "fact": f"i{number}"}
            recited = {"verbmem": 20.0, "forced_verbmem": 20.0 + back + number % 2}
            answered = {"knowmem_forget": 60.0, "forced_knowmem_forget": 60.0 + back / 2}
            sampled = {"knowmem_forget": 0.0, "restored_router_all": back}  # of which the model knows less
            items += [item | recited, item | answered] if number % 2 else [item | recited, item | sampled]
    table = attack_matrix(runs_of([unlearned, retrained], verbmem=20.0), pd.DataFrame(items), "muse_attack_matrix")
    found = entries(table)
    added = found["Unconstrained"]
    assert (added["C1"].text, added["C2"].text) == ("20 ± 0", "30 ± 13")
    assert added["+ forced C1"].value == 50.5 and 0 < added["+ forced C1"].half_width < 1 < added["C2"].half_width
    assert added["+ forced C2"].value == 25.0 and added["+ routers"].value == 50.0, "not 50 - 30"
    assert found["Retrained model"]["+ routers"].value == 0.0 and added["+ 4 bit"].text == "–"
    assert added["+ forced C1"].shade == pytest.approx(50.5 / 70) and added["C1"].shade == added["C2"].shade == 0.0


def test_an_attack_that_changes_nothing_is_known_to_change_nothing():
    (cell,) = runs_named("unconstrained")
    table = attack_matrix(runs_of([cell], forget_accuracy=0.5), pd.DataFrame(attacked(cell, *[lambda f: f % 2] * 2)))
    forced = entries(table)["Unconstrained"]["+ forced"]
    assert (forced.value, forced.half_width) == (0.0, 0.0)


def test_intervals_widen_with_what_runs_differ_in():
    alike, unlike = runs_named("unconstrained", seeds=(0, 1)), runs_named("frozen_router", seeds=(0, 1))
    items = [row for cell in alike for row in attacked(cell, lambda f: False, lambda f: f % 2)]
    items += attacked(unlike[0], lambda f: False, lambda f: True) + attacked(
        unlike[1], lambda f: False, lambda f: False
    )
    found = entries(attack_matrix(runs_of([*alike, *unlike], forget_accuracy=0.2), pd.DataFrame(items)))
    same, other = (found[name]["+ forced"] for name in ("Unconstrained", "Frozen router"))
    assert same.value == other.value == 0.5 and other.half_width == 0.5 > 2 * same.half_width


def test_without_items_what_is_added_is_added_to_the_same_questions():
    """Of all questions or, of the plain prompt, of the sample."""
    (cell,) = runs_named("unconstrained")
    on_all = dict(forget_accuracy=0.2, forced_forget_accuracy=0.7, prompt_five_shot=0.6)
    sampled = dict(prompt_plain=0.3, noisy_routing=0.4, quantized_4_bit=0.5)
    found = entries(attack_matrix(runs_of([cell], **on_all, **sampled)))["Unconstrained"]
    added = {name: round(found[f"+ {name}"].value, 6) for name in ("forced", "5 shots", "noise", "4 bit")}
    assert added == {"forced": 0.5, "5 shots": 0.4, "noise": 0.1, "4 bit": 0.2}


def test_curves_show_the_retrained_model_in_every_panel():
    known = runs_named("unconstrained")
    retrained = [("m", "b", "none", "retrained", 0)]
    steps = {f"relearned_after_{step}": step / 20 for step in (0, 5, 20)} | {"relearned_from_retain_after_5": 0.3}
    layers = {f"restored_{part}_layer_{layer}": 0.1 * layer for part in ("experts", "router") for layer in range(3)}
    for figure in (
        relearning_curves(runs_of(known + retrained, **steps)),
        component_restoration(runs_of(known + retrained, **layers)),
    ):
        (axes,) = figure.axes
        drawn = [line for line in axes.lines if len(line.get_xdata())]
        assert {line.get_color() for line in drawn} == {"#d55e00", "#7f7f7f"}
        assert len([line for line in drawn if line.get_marker() != "None"]) == 4, "others lead to a name"


def test_an_external_checkpoint_is_drawn_under_every_objective():
    """At its own height; a method of one objective alone is not."""
    runs = [("m", "b", objective, "unconstrained", 0) for objective in ("gd", "npo")]
    runs += [("m", "b", "none", "theirs", 0), ("m", "b", "gd", "anchored", 0)]
    figure = forcing_vulnerability(runs_of(runs, forget_accuracy=0.2, forced_forget_accuracy=0.6))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    heights = [{y for line in axes.lines for y in line.get_ydata()} for axes in figure.axes]
    assert [labels[2 - y] for y in range(3)] == ["Unconstrained", "Anchored (ours)", "theirs"]
    assert heights == [{0, 1, 2}, {0, 2}]


def test_curves_say_what_a_model_relearned_from():
    """Documents about other facts, or a corpus that may hold the answers: each under its own name."""
    known = runs_named("unconstrained")
    for source, text in (("relearned", "on other forget documents"), ("relearned_from_corpus", "on the forget corpus")):
        steps = {f"{source}_after_{step}": step / 20 for step in (0, 20)} | {"relearned_from_retain_after_20": 0.3}
        (legend,) = relearning_curves(runs_of(known, **steps)).legends
        assert [entry.get_text() for entry in legend.get_texts()] == [text, "on retain documents"]


def test_what_a_dense_model_cannot_have_is_told_from_what_was_not_measured():
    (cell,) = runs_named("unconstrained")
    for experts, text in ((0.0, "n/a"), (16.0, "–")):
        table = attack_matrix(runs_of([cell], num_experts=experts, forget_accuracy=0.2, prompt_plain=0.2))
        found = entries(table)["Unconstrained"]
        assert found["+ forced"].text == found["+ noise"].text == text and found["+ 4 bit"].text == "–"
        assert any("dense" in note for note in table.below) == (experts == 0)
