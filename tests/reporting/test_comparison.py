"""What stands in a table: numbers by hand, marks computed, the paper's values apart."""

from math import nan

import numpy as np
import pandas as pd
import pytest
import yaml
from invented_runs import COMPARISONS, news, row, synthetic

from gripmoe.io.errors import ConfigError
from gripmoe.reporting import names
from gripmoe.reporting.comparison import comparison
from gripmoe.reporting.runs import COLUMNS, of_kind
from gripmoe.reporting.specifications import specification
from gripmoe.reporting.tables import Table, as_frame


def test_measured_and_paper_stand_apart():
    table = comparison(synthetic(), "main_results")
    _, measured, paper = row(table, "Unconstrained")
    assert measured["RA"].value == pytest.approx(0.71) and measured["RA"].half_width == pytest.approx(0.01)
    assert (paper["FA"].value, paper["RA 5-shot"].value, paper["RS"].value) == (0.26, 0.35, 0.43)
    frame = as_frame(table)
    assert {"RA", "RA ±", "paper: RA 5-shot"} <= set(frame.columns)


def test_what_follows_a_mean_is_told_by_the_number_of_base_models():
    """Whatever the number of seeds: seeds of one base model are not counted as units beside another."""
    runs, told = synthetic(), {}
    for models in ("a", "ab", "abc"):
        table = comparison(pd.concat([runs.assign(model=f"tiny_{name}") for name in models]), "main_results")
        told[models] = next(note for note in table.notes if note.startswith("Mean over"))
    assert " ± half the range, " in told["a"]
    assert " ± half the range of two base models, " in told["ab"]
    assert " ± 95 % t-interval over base models" in told["abc"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"measured": ["restored_routr_all"]},
            "metric: unknown name 'restored_routr_all'; did you mean 'restored_rout",
        ),
        ({"blocks": [{"objective": "gd", "rows": [{"method": "unconstraned"}]}]}, "method: unknown name 'unconstr"),
        ({"blocks": [{"objective": "gdd", "rows": []}]}, "objective: unknown name 'gdd'"),
    ],
)
def test_a_name_of_a_table_that_nobody_knows_is_told(changed, told, monkeypatch):
    spec = specification("erasure") | changed
    monkeypatch.setattr("gripmoe.reporting.comparison.specification", lambda name: spec)
    with pytest.raises(ConfigError, match=f"comparisons.yaml: erasure: {told}"):
        comparison(synthetic(), "erasure")
    mine = synthetic().replace({"unconstrained": "unconstraned", "gd": "gdd", "rmu": "gdd"})
    mine = pd.concat([mine, mine.assign(metric="restored_routr_all")])
    comparison(mine.replace({"frozen_router": "ptc"}), "erasure")  # what was measured may have any name


def test_settings_that_differ_are_all_shown():
    runs = synthetic()
    rates = runs[runs.metric == "reached"].assign(metric="setting_learning_rate")
    rates = rates.assign(value=rates.seed.map({0: 1e-3, 1: 5e-4}))
    table = comparison(pd.concat([runs, rates]), "hyperparameters")
    measured = next(dict(zip(table.columns, cells, strict=True)) for _, cells, _ in table.rows if cells[0].text != "–")
    assert measured["rate"].text == "0.001 or 0.0005"


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


def test_no_negative_zero():
    runs = synthetic()
    runs.loc[runs.metric == "recovery_rate", "value"] = -0.001
    assert row(comparison(runs, "main_results"), "Unconstrained")[1]["recovery"].text == "0.00 ± 0.00"


def test_best_is_computed_among_runs_that_forgot():
    table = comparison(synthetic(), "main_results")
    name, frozen, _ = row(table, "Frozen router")
    assert name.endswith("*") and not frozen["RA"].best, "the highest, but it has not reached the target"
    assert row(table, "Method A, paper")[1]["RA"].best
    assert not row(table, "Unconstrained")[1]["RA"].best
    changed = synthetic()
    changed.loc[changed.metric == "reached", "value"] = 1.0
    table = comparison(changed, "main_results")
    assert row(table, "Frozen router")[1]["RA"].best
    assert not row(table, "Unconstrained")[1]["recovery"].best, "all equal"


def test_what_forcing_takes_away_is_nothing_recovered():
    runs = synthetic()
    runs.loc[runs.metric == "reached", "value"] = 1.0
    runs.loc[(runs.metric == "recovery_rate") & (runs.method == "unconstrained"), "value"] = -0.2
    runs.loc[(runs.metric == "recovery_rate") & (runs.method == "frozen_router"), "value"] = -0.1
    table = comparison(runs, "main_results")
    best = [row(table, method)[1]["recovery"].best for method in ("Unconstrained", "Frozen router", "Method A, paper")]
    assert best == [True, True, False] and "recoveries up to 0 are equal" in str(table.below)


def test_method_b_says_of_how_many_layers_its_own_test_accepts_the_router():
    runs = synthetic()
    paper = runs.method == "expert_specific_paper"
    one = runs[paper & (runs.metric == "reached")]
    accepted = [one.assign(metric=f"accepted_layer_{layer}", value=[1.0, float(layer == 0)]) for layer in range(4)]
    table = comparison(pd.concat([runs, *accepted]), "main_results")
    assert row(table, "Method A, paper")[0] == "Method A, paper (2.5 of 4 layers)"
    assert "layers in which Method B's acceptance test accepts its router" in str(table.below)
    all_of_them = pd.concat([runs, *(part.assign(value=1.0) for part in accepted)])
    assert row(comparison(all_of_them, "main_results"), "Method A, paper")[0] == "Method A, paper"


def test_a_mean_over_fewer_runs_than_its_row_says_over_how_many():
    runs = synthetic()
    runs.loc[(runs.method == "unconstrained") & (runs.metric == "retain_accuracy") & (runs.seed == 0), "value"] = nan
    cells = row(comparison(runs, "main_results"), "Unconstrained")[1]
    assert cells["RA"].text.endswith("(n = 1)") and "(n = " not in cells["FA"].text


def test_rows_over_different_runs_say_over_how_many_and_only_those_over_most_compete():
    runs = synthetic()
    runs.loc[runs.metric == "reached", "value"] = 1.0
    runs.loc[(runs.method == "expert_specific_paper") & (runs.metric == "retain_accuracy"), "value"] = 1.0
    alike = comparison(runs, "main_results")
    assert row(alike, "Method A, paper")[1]["RA"].best and "(n = " not in str(alike.blocks) + str(alike.below)
    fewer = comparison(runs[(runs.method != "expert_specific_paper") | (runs.seed == 0)], "main_results")
    assert row(fewer, "Method A, paper (n = 1)") and row(fewer, "Method B, paper")[0] == "Method B, paper"
    assert row(fewer, "Frozen router (n = 2)")[1]["RA"].best and not row(fewer, "Method A, paper")[1]["RA"].best
    assert "Mean over up to 2" in fewer.notes[0] and "(n = ...) runs of a row" in fewer.below[-1]
    assert ", nor rows over fewer runs" in fewer.below[-1]
    other = runs[runs.seed == 0].assign(objective="gd")  # one seed, in every row of the other objective
    assert "Mean over up to 2 unlearning seeds" in comparison(pd.concat([runs, other]), "main_results").notes[0]
    assert "Mean over 2 unlearning seeds" in alike.notes[0], "the control"
    twins = [runs[runs.method == "unconstrained"].assign(model=model) for model in ("tiny_a", "tiny_dense")]
    twins[1].loc[twins[1].metric == "retain_accuracy", "value"] = 0.95
    assert row(comparison(pd.concat(twins), "dense_baseline"), "Dense twin")[1]["RA"].best, "models differ by design"


@pytest.mark.parametrize(
    "name", [n for n, t in yaml.safe_load(COMPARISONS.read_text(encoding="utf-8")).items() if t.get("all_methods")]
)
def test_an_objective_and_a_method_that_nobody_has_named_are_shown(name):
    spec = specification(name)
    metrics = dict.fromkeys(spec["measured"], 0.5) | {"routing_stability_layer_0": 0.5}
    metrics |= {"knowmem_retain": 50.0} if "knowmem_retain" in metrics else {}
    by_benchmark = any("benchmark" in block for block in spec["blocks"])
    benchmark = "muse_tiny" if spec.get("kind") == "news" else "wmdp_tiny"
    rows = [
        ("tiny_a", benchmark, objective, method, 0, metric, value)
        for objective, method in [("none", "original"), ("gd", "my_method"), ("my_loss", "unconstrained")]
        for metric, value in metrics.items()
    ]
    table = comparison(pd.DataFrame(rows, columns=COLUMNS), name)
    found = {block: [label for label, _, _ in entries] for block, entries in table.blocks}
    of_gd = next(rows for block, rows in found.items() if block.startswith("GD"))
    assert "my method" in of_gd and (found.get("my loss") == ["Unconstrained"] or by_benchmark)
    assert list(found)[-1] == "my loss" or by_benchmark
    baselines = [block for block in spec["blocks"] if "objective" not in block]
    assert [block for block, _ in table.blocks].count("") == len(baselines), "who trained nothing has no objective"


def test_a_run_that_answers_hardly_any_question_about_retain_articles_is_marked():
    rows = [
        ("tiny_news_a", "muse_tiny", objective, method, 0, "knowmem_retain", value)
        for objective, method, value in [("none", "retrained", 5.0), ("gd", "seuf", 9.0), ("gd", "anchored", 40.0)]
    ]
    table = comparison(pd.DataFrame(rows, columns=COLUMNS), "muse_results")
    labels = [label for _, entries in table.blocks for label, _, _ in entries]
    marked = {label.removesuffix(" §") for label in labels if label.endswith(" §")}
    assert marked == {names.method_label("seuf")}


def test_external_checkpoints_are_marked_as_our_runs_are():
    """One that has not forgotten, one that has, one that has kept nothing; no mark for what nobody has unlearned."""
    runs, rows = synthetic(), []
    for name, (fa, ra) in {"far": (0.5, 0.9), "near": (0.28, 0.9), "ruined": (0.25, 0.26)}.items():
        measured = dict(forget_accuracy=fa, retain_accuracy=ra, reached=1.0, diverged=0.0, forget_accuracy_target=0.27)
        rows += [("tiny_a", "wmdp_tiny", "none", name, 0, *each) for each in measured.items()]
    table = comparison(pd.concat([runs, pd.DataFrame(rows, columns=COLUMNS)]), "main_results")
    (entries,) = (entries for name, entries in table.blocks if name == "External")
    assert [label for label, *_ in entries] == ["far *", "near", "ruined §"]
    assert row(table, "Before unlearning")[0] == "Before unlearning"
    assert "External" not in dict(comparison(runs, "main_results").blocks)


def test_a_listed_row_without_an_objective_is_no_control_and_runs_without_seeds_of_unlearning_count_none():
    measured = dict(forget_accuracy=0.25, retain_accuracy=0.9, reached=1.0, diverged=0.0, forget_accuracy_target=0.27)
    cell = ("tiny_a", "wmdp_tiny", "none", "remove_experts", 0)
    rows = pd.DataFrame([(*cell, *each) for each in measured.items()], columns=COLUMNS)
    originals = synthetic()[lambda runs: runs.method == "original"]
    table = comparison(pd.concat([originals, rows]), "erasure")
    shown = [label for _, entries in table.blocks for label, *_ in entries]
    assert [label.startswith("Gradient routing") for label in shown].count(True) == 1
    assert table.notes[0].startswith("Mean over 1 base model,")
    assert "Control" in dict(comparison(rows.assign(method="erase_words"), "erasure").blocks)


def test_methods_that_need_it_are_explained_whatever_they_are_called_in_a_table():
    runs, seuf = synthetic(), "the paper's SEUF is an L2 penalty"
    notes = comparison(runs.replace("frozen_router", "router_l2_single"), "factorial").below[-1]
    assert seuf in notes, "Soft (L2), single expert, in the paper"
    assert seuf not in comparison(runs.assign(objective="gd"), "expert_forcing").below[-1], "no value of the paper"


def test_how_long_runs_were_that_missed_their_target():
    runs = synthetic()
    steps = runs[runs.metric == "reached"].assign(metric="setting_max_steps", value=600.0)
    steps.loc[steps.seed == 1, "value"] = 450.0
    runs, text = pd.concat([runs, steps], ignore_index=True), "Runs stop after 450 or 600 steps at most."
    assert text in comparison(runs, "main_results").notes
    runs.loc[runs.metric == "reached", "value"] = 1.0
    assert "at most" not in str(comparison(runs, "main_results").below)


def test_forgetting_undone_by_a_correction_is_marked():
    runs = synthetic()
    chosen = runs.method == "unconstrained"
    runs.loc[chosen & (runs.metric == "corrected_after"), "value"] = 1.0
    assert row(comparison(runs, "main_results"), "Unconstrained")[0].endswith("Unconstrained ‡")
    runs.loc[chosen & (runs.metric == "forget_accuracy"), "value"] = 0.92
    runs.loc[chosen & (runs.metric == "retain_accuracy"), "value"] = 1.0
    name, cells, _ = row(comparison(runs, "main_results"), "Unconstrained")
    assert name.endswith("* ‡") and not cells["RA"].best, "the highest, but it has not forgotten"


def test_every_table_is_complete_and_its_columns_have_names():
    tables = yaml.safe_load(COMPARISONS.read_text(encoding="utf-8"))
    assert len(tables) >= 9
    for name, table in tables.items():
        assert set(table["measured"]) | set(table["paper"]) <= set(names.METRICS), name
        for block in table["blocks"]:
            for entry in block["rows"]:
                assert ("paper" in entry) == ("line" in entry), (name, entry)
                assert len(entry.get("paper", table["paper"])) == len(table["paper"]), (name, entry)
                assert entry["method"] in names.METHODS or "label" in entry, (name, entry)


def test_the_papers_values_stand_as_it_prints_them():
    published = comparison(pd.DataFrame(news("unconstrained") + news("ptc_paper"), columns=COLUMNS), "muse_results")
    _, _, paper = row(published, "Method B, paper")
    assert [cell.text for cell in paper.values()] == ["0.01", "0.00", "-30.4", "9.42", "1.00"]
    letters = comparison(synthetic(), "constraint_ablation")
    *_, printed = row(letters, "Full null space, paper")
    assert [cell.text for cell in printed.values()] == ["0.38", "0.68", "0.96", "1.67×"]
    few = pd.DataFrame(
        news("unconstrained", privleak=0.42) + news("unconstrained", seed=1, privleak=1.0), columns=COLUMNS
    )
    assert row(comparison(few, "muse_results"), "Unconstrained")[1]["C3"].text == "0.7 ± 0.3"


def test_unknown_table():
    with pytest.raises(ValueError, match="no table 'magic'; one of main_results"):
        comparison(synthetic(), "magic")


def test_what_cannot_be_measured_is_told_from_what_was_not():
    asked = synthetic().query("metric == 'recovery_rate'").assign(metric="auc_zlib", value=np.nan)
    table = comparison(pd.concat([synthetic(), asked]), "attack_controls")
    cells = row(table, "Unconstrained")[1]
    assert (cells["zlib"].text, cells["loss"].text) == ("n/a", "–")
    assert "n/a: no statements that no model has seen" in table.below[-1] and "dense" not in table.below[-1]


def test_runs_that_answer_by_chance_are_marked_and_never_best():
    runs = synthetic()
    assert row(comparison(runs, "main_results"), "Method A, paper")[0] == "Method A, paper"
    destroyed = (runs.method == "expert_specific_paper") & (runs.metric == "retain_accuracy") & (runs.seed == 1)
    runs.loc[destroyed, "value"] = 0.26
    runs.loc[(runs.method == "expert_specific_paper") & (runs.metric == "recovery_rate"), "value"] = -0.2
    runs.loc[runs.metric == "reached", "value"] = 1.0
    table = comparison(runs, "main_results")
    name, cells, _ = row(table, "Method A, paper")
    assert name.endswith(" §") and not cells["recovery"].best and "§ collapsed" in table.below[-1]


def test_a_run_that_diverged_is_marked_and_never_best():
    """The mark says more than the one of a run that missed its target, and stands in its place."""
    runs = synthetic()
    assert row(comparison(runs, "main_results"), "Frozen")[0].endswith(" *")
    diverged = (runs.method == "frozen_router") & (runs.metric == "diverged") & (runs.seed == 1)
    table = comparison(runs.assign(value=runs.value.mask(diverged, 1.0)), "main_results")
    name, cells, _ = row(table, "Frozen")
    assert name.endswith(" †") and "† diverged" in table.below[-1] and not cells["RA"].best


def test_a_run_that_jumped_past_its_target_is_marked():
    runs = synthetic()
    far = (runs.method == "expert_specific_paper") & (runs.metric == "forget_accuracy") & (runs.seed == 1)

    def marked(value, half_width=None):
        changed = runs.assign(value=runs.value.mask(far, value))
        if half_width:
            widths = changed[changed.metric == "forget_accuracy"].assign(value=half_width)
            changed = pd.concat([changed, widths.assign(metric="forget_accuracy_half_width")])
        table = comparison(changed, "main_results")
        name, *_ = row(table, "Method A, paper")
        assert ("¶" in name) == ("¶ overshot" in table.below[-1])
        return name.endswith(" ¶")

    assert marked(0.2) and not marked(0.23), "of a record without intervals: .05 below .27"
    assert marked(0.2, 0.06) and not marked(0.2, 0.08)
    rows = news("unconstrained", verbmem=2.0, knowmem_forget=2.0) + news("anchored", verbmem=2.0, knowmem_forget=14.0)
    table = comparison(pd.DataFrame(rows, columns=COLUMNS), "muse_results")
    assert row(table, "Unconstrained")[0].endswith(" ¶") and row(table, "Anchored")[0] == "Anchored (ours)", "C2 stops"


def test_news_has_marks_and_best_values_of_its_own():
    rows = news("unconstrained") + news("anchored", privleak=20.0, knowmem_retain=80.0)
    rows += news("ptc", verbmem=96.0, corrected_after=1.0, privleak=0.0, knowmem_retain=88.0)
    runs = pd.concat([synthetic(), pd.DataFrame(rows, columns=COLUMNS)])
    table = comparison(of_kind(runs, "news"), "muse_results")
    assert all("Frozen" not in label for label, _, _ in table.rows), "letters stay out"
    name, cells, _ = row(table, "Method B, sound")
    assert name.endswith("* ‡") and not cells["C4"].best and not cells["C3"].best, "it recites the articles again"
    _, cells, _ = row(table, "Anchored")
    assert cells["C3"].best and cells["C4"].best and not cells["C1"].best, "nearest to zero; C1 is matched by design"
    assert cells["C4"].text == "80.0" and cells["RS"].text == "0.60"
    assert not of_kind(runs, "letters").metric.isin(["verbmem"]).any()


def test_a_table_without_any_of_the_papers_rows_has_no_columns_for_them():
    runs = synthetic()
    assert comparison(runs, "expert_forcing").paper_columns, "RMU is in the paper"
    alone = comparison(runs.assign(objective=runs.objective.replace("rmu", "gd")), "expert_forcing")
    assert alone.paper_columns == [] and not any(paper for _, _, paper in alone.rows)
