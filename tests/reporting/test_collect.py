"""Files of finished runs become tidy tables: by hand."""

import numpy as np
import pandas as pd
import pytest

from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_csv, write_json, write_yaml
from gripmoe.reporting.collect import collect_runs
from gripmoe.reporting.runs import load_answers, load_attacks, load_histories, load_runs
from gripmoe.reporting.scores import at_equal_forgetting, tradeoff_area


def test_collecting_runs(tmp_path):
    cell = tmp_path / "cell"
    key = {"model": "m", "benchmark_name": "b", "objective": "none", "method_name": "ptc", "seed": 3}
    settings = {"benchmark": {"target": {"forget_accuracy": 0.27}}, "method": {"corrects": "unconstrained"}}
    settings["training"] = {"learning_rate": 0.1, "betas": [0.9, 0.99], "objective": {"alpha": 2.0, "layer": 1}}
    write_yaml(cell / "run.yaml", key | settings)
    of_layers = {f"routing_stability_layer_{layer}": value for layer, value in enumerate((1.0, 0.6, 0.5, 0.1))}
    of_sets = {"routing_stability": 0.6, "num_experts": 2, "top_k": 1}  # of which two random ones agree to 0.5
    write_json(cell / "evaluation.json", {"forget_accuracy": 0.25} | of_layers | of_sets)
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
    collect_runs([cell], *tables)
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
    sides = [values[f"routing_stability_{side}_steered_layer"] for side in ("to", "above")]
    assert sides == pytest.approx([0.8, 0.3])
    assert values["routing_stability_corrected"] == pytest.approx(0.2)
    assert (values["forget_accuracy_target"], values["corrected_after"]) == (0.27, 1.0)
    assert "weights" not in values and (values["setting_learning_rate"], values["setting_alpha"]) == (0.1, 2.0)
    write_csv(cell / "attack_questions.csv", [{"id": "dev/1", "forget_accuracy": 0.0, "noisy_routing": 1.0}])
    with pytest.raises(ConfigError, match=r"attack_questions.csv: 'dev/1' is no test question"):
        collect_runs([cell], *(tmp_path / f"{name}_w.csv" for name in ("runs", "histories", "answers", "attacks")))
    write_json(cell / "attack.json", {"num_experts": 3.0})
    with pytest.raises(ConfigError, match="cell: an attack and an evaluation return 'num_experts'"):
        collect_runs([cell], *(tmp_path / f"{name}_w.csv" for name in ("runs", "histories", "answers", "attacks")))
    (tmp_path / "bad.csv").write_text("model,value\nm,1\n")
    with pytest.raises(ValueError, match="no column benchmark"):
        load_runs(tmp_path / "bad.csv")


@pytest.mark.parametrize(
    "status, reached", [("edited", 1.0), ("external", 1.0), ("reached", 1.0), ("not_reached", 0.0)]
)
def test_without_a_stop_rule_no_run_missed_its_target(status, reached, tmp_path):
    run = {"model": "m", "benchmark_name": "b", "objective": "none", "method_name": "erase_words", "seed": 0}
    benchmark = {"target": {"forget_accuracy": 0.27}}
    write_yaml(tmp_path / "run.yaml", run | {"benchmark": benchmark, "method": {"corrects": None}})
    write_json(tmp_path / "checkpoint.json", {"weights": "w", "status": status})
    for name in ("evaluation", "attack"):
        write_json(tmp_path / f"{name}.json", {"forget_accuracy": 0.2})
    for name in ("questions", "attack_questions"):
        (tmp_path / f"{name}.csv").write_text("id\n")
    collect_runs([tmp_path], *(tmp_path / f"{name}_w.csv" for name in ("runs", "histories", "answers", "attacks")))
    assert load_runs(tmp_path / "runs_w.csv").set_index("metric").value["reached"] == reached


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
    collect_runs(folders, *(tmp_path / f"{name}_w.csv" for name in ("runs", "histories", "answers", "attacks")))
    runs = load_runs(tmp_path / "runs_w.csv")
    found = runs[runs.metric == "whole_time_ratio"].set_index("method").value.to_dict()
    assert found == dict(
        unconstrained=1.0, frozen_router=0.5, expert_specific=(4 + 6 + 25) / 20, anchored=64 / 20, ptc=25 / 20
    )
    assert runs[runs.metric == "auc_zlib"].value.isna().sum() == len(folders), "asked of all, known of none"
    cell("unconstrained", "none", steps=0, seconds_per_step=2.0, plain_seconds_per_step=2.0)  # had forgotten before
    collect_runs(folders, *(tmp_path / f"{name}_w.csv" for name in ("runs", "histories", "answers", "attacks")))
    assert "whole_time_ratio" not in set(load_runs(tmp_path / "runs_w.csv").metric)


def test_the_targets_on_the_way_are_those_of_the_items_asked_on_the_way(tmp_path):
    """Checks ask dev items, so targets are those that the run stopped by, and no test scores of the retrained model."""
    folders = [tmp_path / name for name in ("retrained", "gd")]
    for folder in folders:
        run = {"model": "m", "benchmark_name": "b", "objective": folder.name, "method_name": folder.name, "seed": 0}
        benchmark = {"target": {"points_above_retrained": 5}}
        write_yaml(folder / "run.yaml", run | {"benchmark": benchmark, "method": {"corrects": None}})
        write_json(folder / "evaluation.json", {"verbmem": 20.0, "knowmem_forget": 10.0})
        write_json(folder / "attack.json", {})
        for name in ("questions", "attack_questions"):
            (folder / f"{name}.csv").write_text("id\n")
    write_json(folders[1] / "checkpoint.json", {"status": "reached", "targets": {"verbmem": 40.0}})
    scores = zip((80.0, 30.0), (90.0, 50.0), strict=True)
    history = [{"step": n, "verbmem": forget, "knowmem_retain": retain} for n, (forget, retain) in enumerate(scores)]
    write_json(folders[1] / "history.json", history)
    collect_runs(folders, *(tmp_path / f"{name}_w.csv" for name in ("runs", "histories", "answers", "attacks")))
    runs = load_runs(tmp_path / "runs_w.csv", kind=None)
    values = runs[runs.method == "gd"].set_index("metric").value
    assert values["verbmem_target"] == 25.0, "on test items"
    assert values["knowmem_retain_at_target"] == pytest.approx(58.0), "four fifths of the way from 80 to 30"


def test_the_fixed_target_of_letters_is_known_of_runs_that_kept_no_targets(tmp_path):
    run = {"model": "m", "benchmark_name": "b", "objective": "gd", "method_name": "unconstrained", "seed": 0}
    settings = {"benchmark": {"target": {"forget_accuracy": 0.4}}, "method": {"corrects": None}}
    write_yaml(tmp_path / "run.yaml", run | settings)
    write_json(tmp_path / "checkpoint.json", {"status": "reached"})
    scores = [(0.6, 1.0), (0.2, 0.8)]
    history = [{"step": n, "forget_accuracy": f, "retain_accuracy": r} for n, (f, r) in enumerate(scores)]
    write_json(tmp_path / "history.json", history)
    for name in ("evaluation", "attack"):
        write_json(tmp_path / f"{name}.json", {"forget_accuracy": 0.2})
    for name in ("questions", "attack_questions"):
        (tmp_path / f"{name}.csv").write_text("id\n")
    collect_runs([tmp_path], *(tmp_path / f"{name}_w.csv" for name in ("runs", "histories", "answers", "attacks")))
    values = load_runs(tmp_path / "runs_w.csv").set_index("metric").value
    assert values["retain_accuracy_at_target"] == pytest.approx(0.9), "half of the way from 0.6 to 0.2"


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


def test_what_counts_as_forgotten_on_news_comes_from_the_retrained(tmp_path):
    def cell(method, **metrics):
        folder = tmp_path / method
        run = {"model": "m", "benchmark_name": "n", "objective": "none", "method_name": method, "seed": 0}
        settings = {"benchmark": {"target": {"points_above_retrained": 5}}, "method": {"corrects": None}}
        write_yaml(folder / "run.yaml", run | settings)
        write_json(folder / "evaluation.json", metrics)
        write_json(folder / "attack.json", {})
        write_csv(folder / "questions.csv", [{"criterion": "verbmem", "id": "0", "score": 1.0}])
        write_csv(folder / "attack_questions.csv", [{"id": "0", "forced_verbmem": 2.0}])
        return folder

    folders = [
        cell("original", verbmem=100.0, knowmem_forget=65.0, knowmem_retain=80.0),
        cell("retrained", verbmem=22.0, knowmem_forget=12.0, knowmem_retain=90.0),
        cell("ptc", verbmem=60.0, knowmem_forget=30.0, knowmem_retain=40.0),
        cell("anchored", verbmem=60.0, knowmem_forget=30.0, knowmem_retain=0.0),
    ]
    tables = [
        [tmp_path / f"{name}_{part}.csv" for name in ("runs", "histories", "answers", "attacks")] for part in "no"
    ]
    collect_runs(folders, *tables[0])
    collect_runs(folders[2:], *tables[1], known=tables[0][0])  # as runs that a record lacks
    both = [load_runs(paths[0], kind=None).set_index(["method", "metric"]).value for paths in tables]
    pd.testing.assert_series_equal(both[1], both[0].loc[["anchored", "ptc"]])
    assert both[1]["anchored", "knowmem_retain_share"] == 0.0
    values = load_runs(tmp_path / "runs_n.csv", "news").set_index(["method", "metric"]).value
    assert values["ptc", "verbmem_target"] == 27.0 and values["ptc", "knowmem_forget_target"] == 17.0
    assert values["ptc", "knowmem_retain_share"] == 0.5 and values["retrained", "knowmem_retain_share"] == 1.125
    assert load_answers(tmp_path / "runs_n.csv").empty and load_runs(tmp_path / "runs_n.csv").empty
    assert load_answers(tmp_path / "runs_n.csv", "news").score.tolist() == [1.0] * 4
    attacked = load_attacks(tmp_path / "runs_n.csv")
    assert attacked[["verbmem", "forced_verbmem"]].values.tolist() == [[1.0, 2.0]] * 4, "beside what it adds to"


def test_an_id_that_is_a_number_stays_as_it_is_written(tmp_path):
    """Or a question would not be found by the id that its benchmark has."""
    for name in ("answers", "attacks"):
        (tmp_path / f"{name}_w.csv").write_text("benchmark,id,metric\nb,007,forget_accuracy\n")
    tables = load_answers(tmp_path / "runs_w.csv", kind=None), load_attacks(tmp_path / "runs_w.csv")
    assert [table.id.tolist() for table in tables] == [["007"], ["007"]]


def test_items_and_facts_may_be_called_as_a_missing_value_is(tmp_path):
    for name in ("answers", "attacks"):
        (tmp_path / f"{name}_w.csv").write_text(
            "benchmark,id,fact,metric,score\nb,null,NA,forget_accuracy,1\nb,nan,FR,x,\n"
        )
    for table in (load_answers(tmp_path / "runs_w.csv", kind=None), load_attacks(tmp_path / "runs_w.csv")):
        assert table.id.tolist() == ["null", "nan"] and table.fact.tolist() == ["NA", "FR"]
        assert table.score.isna().tolist() == [False, True], "a score may be missing"


def test_the_area_under_retain_over_forget_accuracy_by_hand():
    def area(*checks):
        history = [{"forget_accuracy": forget, "retain_accuracy": retain} for forget, retain in checks]
        return tradeoff_area(history).get("tradeoff_area")

    assert area((1.0, 1.0), (0.25, 1.0)) == pytest.approx(1.0)
    assert area((1.0, 1.0), (0.2, 0.8)) == pytest.approx(0.8), "below chance nothing is gained"
    assert area((1.0, 1.0), (0.625, 0.9)) == pytest.approx((0.25 + 0.9) / 2), "half of the levels were never reached"
    assert area((1.0, 1.0), (0.25, 0.7), (0.25, 0.9), (0.4, 0.5)) == pytest.approx(0.9), "the best of what is reached"
    assert area((1.0, 1.0)) == pytest.approx(0.25), "a run that never forgets"
    assert tradeoff_area([{"verbmem": 50.0}]) == {}


@pytest.mark.parametrize("load", [load_runs, load_histories, load_answers, load_attacks])
def test_a_table_that_is_not_there_is_named(load, tmp_path):
    with pytest.raises(ConfigError, match=r"_w.csv: no table of runs can be read .*collect the runs again"):
        load(tmp_path / "runs_w.csv")
