"""Verdicts by hand, and that every claim can be decided."""

import re
from importlib import resources
from math import ceil

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from gripmoe.config.methods import method_table
from gripmoe.config.reading import read_catalogue
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_yaml
from gripmoe.reporting import claims, names
from gripmoe.reporting.claims import (
    PAIRED_BY,
    VERDICTS,
    Claim,
    all_verdicts,
    claims_table,
    differences,
    judge,
    load_claims,
    primary_claims,
    replication_table,
    units_to_decide,
)
from gripmoe.reporting.runs import COLUMNS
from gripmoe.reporting.uncertainty import student

ROW = {"text": "x.", "line": "ours", "metric": "routing_stability", "left": "a", "relation": ">", "right": "b"}


def stated(**changed):
    """A statement with the keys of ROW, but for those that are changed."""
    return Claim(**ROW | changed)


ABOVE = stated()


def runs(**values):
    """Routing stability of methods, one value per seed."""
    rows = [
        ("tiny_a", "wmdp_tiny", "rmu", method, seed, "routing_stability", value)
        for method, series in values.items()
        for seed, value in enumerate(series)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def verdict(claim, **values):
    return judge(differences(runs(**values), claim), claim)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relation": "<="}, "mine.relation: Input should be '>', '<' or '~'"),
        ({"margn": 0.9}, "mine.margn: unknown key"),
        ({"line": "paper"}, "mine.line"),
    ],
)
def test_a_mistake_in_a_claim_is_named(tmp_path, change, message):
    """Or a statement with another relation would be judged as one with >."""
    write_yaml(tmp_path / "claims.yaml", {"mine": ROW | {"right": 0.5}})
    assert read_catalogue(tmp_path / "claims.yaml", Claim)["mine"].right == 0.5
    write_yaml(tmp_path / "claims.yaml", {"mine": ROW | change})
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_catalogue(tmp_path / "claims.yaml", Claim)


def test_pairs_are_runs_of_the_same_seed():
    pairs = differences(runs(a=[0.9, 0.8, 0.7], b=[0.5, 0.5]), ABOVE)
    assert sorted(pairs.round(6)) == [0.3, 0.4]


def test_the_original_model_stands_for_every_objective_and_seed():
    of_two = pd.concat([runs(a=[0.9, 0.8, 0.7]), runs(a=[0.5]).assign(objective="gd")])
    original = runs(original=[0.4]).assign(objective="none")
    of_another = original.assign(model="tiny_b", value=9.0)
    pairs = differences(pd.concat([of_two, original, of_another]), stated(right="original"))
    assert sorted(pairs.round(6)) == [0.1, 0.3, 0.4, 0.5]
    assert set(pairs.index.unique("objective")) == {"rmu", "gd"}
    alone = differences(pd.concat([of_two, of_another]), stated(right="original"))
    assert alone.empty, "the original of another base model"


def test_two_metrics_of_one_run_may_be_compared():
    data = runs(a=[0.9, 0.8, 0.7], b=[0.1] * 3)
    other = runs(a=[0.6, 0.6], b=[0.0, 0.0]).assign(metric="routing_stability_representation_only")
    claim = stated(right="a", right_metric="routing_stability_representation_only")
    assert sorted(differences(pd.concat([data, other]), claim).round(6)) == [0.2, 0.3]


def test_verdicts_by_hand():
    assert verdict(ABOVE, a=[0.9, 0.8, 0.9], b=[0.5, 0.4, 0.5]) == "holds"
    assert verdict(ABOVE, a=[0.5, 0.4, 0.5], b=[0.9, 0.8, 0.9]) == "does not hold"
    assert verdict(ABOVE, a=[0.9, 0.1, 0.6], b=[0.5, 0.5, 0.5]) == "undecided"
    assert verdict(ABOVE, a=[0.9, 0.8], b=[0.1, 0.1]) == "undecided", "two runs are too few"
    assert verdict(ABOVE, a=[0.9]) == "not measured"
    assert verdict(stated(margin=0.5), a=[0.9, 0.8, 0.9], b=[0.5, 0.4, 0.5]) == "does not hold"
    assert verdict(stated(right=0.5), a=[0.9, 0.8, 0.9]) == "holds"
    assert verdict(stated(relation="<"), a=[0.9, 0.8, 0.9], b=[0.5, 0.4, 0.5]) == "does not hold"
    assert verdict(stated(relation="~", margin=0.1), a=[0.51, 0.5, 0.49], b=[0.5] * 3) == "holds"
    assert verdict(stated(relation="~", margin=0.1), a=[0.9, 0.91, 0.9], b=[0.5] * 3) == "does not hold"


def test_every_claim_is_complete():
    known, methods = load_claims(), method_table()
    assert len(known) >= 25
    for name, claim in known.items():
        assert claim.left in methods, name
        assert not claim.compares_methods or claim.right in methods, name
        assert {claim.metric, claim.metric_of_right} <= names.METRICS.keys(), name
        of_methods = claim.compares_methods and claim.right not in names.NOT_UNLEARNED
        assert of_methods <= ("margin" in claim.model_fields_set), f"{name}: a negligible difference would do"


def test_costs_of_a_step_are_compared_between_methods_that_train():
    """Method B is computed once, after training: its cost is that of a whole run."""
    methods, compared = method_table(), {"time_ratio": set(), "whole_time_ratio": set()}
    for claim in load_claims().values():
        if claim.metric in compared and claim.compares_methods:
            compared[claim.metric].add(claim.left)
            compared[claim.metric_of_right].add(claim.right)
    corrected = {metric: {name for name in names if methods[name].corrects} for metric, names in compared.items()}
    assert not corrected["time_ratio"] and corrected["whole_time_ratio"]


def printed_differences(tables, metric, *methods):
    """What the paper prints between two methods, of each of its `tables` the least over objectives."""
    for table in [table for table in tables.values() if metric in table["paper"]]:
        column, printed = table["paper"].index(metric), {}
        for block in table["blocks"]:
            for row in [row for row in block["rows"] if "paper" in row]:
                printed.setdefault(block.get("objective"), {})[row["method"]] = row["paper"][column]
        both = [[values[method] for method in methods] for values in printed.values() if {*methods} <= set(values)]
        yield from [min(abs(left - right) for left, right in both)] if both else []


def test_between_methods_a_third_of_what_the_paper_finds_is_asked_for():
    tables = yaml.safe_load((resources.files("gripmoe.reporting") / "comparisons.yaml").read_text(encoding="utf-8"))
    checked = []
    for name, claim in load_claims().items():
        found = list(printed_differences(tables, claim.metric, claim.left, claim.right))
        if found and claim.relation != "~" and claim.line != "ours":
            unit = 1 if claim.kind == "news" and claim.metric != "routing_stability" else 0.01
            thirds = [unit * ceil(difference / 3 / unit - 1e-6) for difference in found]
            assert any(claim.margin == pytest.approx(third) for third in thirds), (name, thirds)
            checked.append(name)
    assert len(checked) >= 14 and "prompts_recover" in checked
    prompts = load_claims()["prompts_recover"]

    def more(by):
        return differences_of(prompts, by=[by - 0.001, by, by + 0.001])

    assert judge(more(0.01), prompts)[0] == "does not hold" and judge(more(0.07), prompts)[0] == "holds"


def differences_of(claim, by):
    data = runs(**{claim.left: [0.1 + value for value in by], claim.right: [0.1] * len(by)})
    return differences(data.assign(metric=claim.metric), claim)


def test_how_many_runs_would_decide_a_claim():
    undecided = differences(runs(a=[0.9, 0.1, 0.6], b=[0.5, 0.5, 0.5]), ABOVE)
    assert units_to_decide(undecided, ABOVE) is None, "the mean is a sixth of a standard deviation from the margin"
    closer = differences(runs(a=[0.9, 0.5, 0.7], b=[0.5, 0.5, 0.5]), ABOVE)
    needed = units_to_decide(closer, ABOVE)
    assert judge(closer, ABOVE)[0] == "undecided" and needed > 3
    mean, deviation = closer.mean(), closer.std()
    generator, decided = np.random.default_rng(0), 0
    for _ in range(200):
        drawn = pd.Series(generator.normal(mean, deviation, needed), range(needed))
        decided += mean > 0 and drawn.mean() > stats.t.ppf(0.975, needed - 1) * drawn.sem()
    assert 0.7 < decided / 200 < 0.9, "with the probability that is told"
    assert units_to_decide(closer, stated(margin=0.195)) is None, "nearer to the margin than 100 runs resolve"
    told = all_verdicts(runs(unconstrained=[0.3, 0.7, 0.4])).set_index("claim").to_decide
    assert told["routing_collapses"].startswith(("about", "> 100")) and told["b_above_a"] == (
        "runs of ptc_paper and expert_specific_paper"
    )


@pytest.mark.parametrize("mean", [0.0, 0.005, 0.015, 0.06])
def test_how_many_runs_would_decide_that_two_are_equal(mean):
    """An interval inside both limits has to clear both; one beyond a limit, that limit alone."""
    equal, sample = stated(relation="~", margin=0.03), np.array([-1.0, 0.0, 1.0] * 2)
    needed = units_to_decide(pd.Series(0.05 * sample / sample.std(ddof=1) + mean), equal)
    drawn = np.random.default_rng(0).normal(mean, 0.05, (4000, needed))
    half = stats.t.ppf(0.975, needed - 1) * stats.sem(drawn, axis=1)
    low, high = drawn.mean(axis=1) - half, drawn.mean(axis=1) + half
    decided = ((low > -0.03) & (high < 0.03)) | (low > 0.03) | (high < -0.03)
    assert 0.78 < decided.mean() < 0.86, "with the probability that is told"


def test_a_base_model_that_is_left_out_leaves_no_runs_as_units():
    """Of two base models, one lacks objectives and contradicts the other."""
    objectives = ("gd", "kl", "npo", "rmu")
    rows = [("tiny_a", objective, seed, 0.15 + 0.001 * seed) for objective in objectives for seed in (0, 1)]
    rows += [("tiny_b", "gd", seed, -0.1) for seed in (0, 1)]
    index = pd.MultiIndex.from_tuples([(model, "wmdp_tiny", *row) for model, *row, _ in rows], names=PAIRED_BY)
    pairs = pd.Series([value for *_, value in rows], index)
    found = judge(pairs, ABOVE)
    assert (found.verdict, found.unit, len(found.values)) == ("undecided", "base model", 1)
    alone = judge(pairs[pairs.index.get_level_values("model") == "tiny_a"], ABOVE)
    assert (alone.verdict, alone.unit) == ("holds", "run"), "the control: no other base model was measured"


def test_the_table_counts_what_it_shows():
    data = runs(unconstrained=[0.3, 0.31, 0.29], expert_specific=[0.7, 0.71, 0.72])
    table = claims_table(data)
    verdicts = table.data
    assert len(table.rows) == len(verdicts) == sum(not claim.only_in for claim in load_claims().values())
    assert set(verdicts.verdict) <= set(VERDICTS) and (verdicts.verdict == "holds").sum() >= 1
    shown = {cells[1].text for _, cells, _ in table.rows}
    of_one, of_two = stated(right=0.5, relation="<"), stated(margin=0.13)
    assert "0.30" in shown and claims.as_text(-0.001, of_two) == "+0.00"
    assert (claims.as_text(-0.2, of_one), claims._asked(of_one)) == ("0.30", "< 0.5"), "of one method its value"
    assert (claims.as_text(-0.2, of_two), claims._asked(of_two)) == ("-0.20", "> +0.13"), "of two their difference"
    assert f"{(verdicts.verdict == 'not measured').sum()} not measured" in table.notes[2]
    others = verdicts[~verdicts.primary]
    decided = others[others.verdict.isin(VERDICTS[:2])]
    assert f"{decided.survives_holm.sum()} of their {len(decided)} verdicts survive" in table.notes[1]
    compared = verdicts.set_index("claim").comparison
    assert compared["a_above_frozen"] == "RS: expert_specific_paper > frozen_router + 0.13"
    assert compared["drift_caps_a"] == "RS: expert_specific ~ expert_specific (RS repr.) ± 0.05"


def test_runs_that_have_not_forgotten_are_left_out_of_the_second_analysis_unless_it_is_about_them():
    data = runs(a=[0.9, 0.8, 0.1], b=[0.5, 0.4, 0.5])
    missed = data.assign(metric="reached", value=[1, 1, 0, 1, 1, 1])
    assert len(differences(pd.concat([data, missed]), ABOVE)) == 3, "where they ended"
    assert len(differences(pd.concat([data, missed]), ABOVE, forgot=True)) == 2
    assert len(differences(pd.concat([data, missed]), stated(unreached=True), forgot=True)) == 3


def test_a_correction_that_undid_forgetting_has_not_forgotten():
    """Though the run that it corrects had reached its target."""
    data = runs(a=[0.9, 0.8, 0.1], b=[0.5, 0.4, 0.5])
    reached = data.assign(metric="reached", value=1.0)
    target = data.assign(metric="forget_accuracy_target", value=0.27)
    forgot = data.assign(metric="forget_accuracy", value=[0.31, 0.9, 0.2, 0.25, 0.25, 0.25])
    together = pd.concat([data, reached, target, forgot])
    assert len(differences(together, ABOVE)) == 3
    assert len(differences(together, ABOVE, forgot=True)) == 2
    assert len(differences(together, stated(unreached=True), forgot=True)) == 3


def test_what_forcing_takes_away_counts_as_it_is():
    below = runs(a=[-0.4, 0.1, 0.1], b=[0.0, 0.0, 0.0]).assign(metric="recovery_rate")
    claim = stated(metric="recovery_rate", right=0.0)
    assert sorted(differences(below, claim).round(6)) == [-0.4, 0.1, 0.1]


def test_a_run_that_lost_everything_speaks_for_no_method():
    """It has nothing to recover, and routes as its wreck routes; that it retains nothing counts against it."""
    data = runs(a=[0.9, 0.8, 0.7], b=[0.5, 0.4, 0.5])
    retained = data.assign(metric="retain_accuracy", value=[0.9, 0.9, 0.25, 0.9, 0.9, 0.9])
    both = pd.concat([data, retained])
    assert len(differences(both, ABOVE)) == 3 and len(differences(both, ABOVE, forgot=True)) == 2
    assert len(differences(both, stated(unreached=True), forgot=True)) == 2
    kept = differences(both, stated(metric="retain_accuracy"))
    assert sorted(kept.round(6)) == [-0.65, 0.0, 0.0]


def test_a_statement_must_hold_for_each_kind_of_base_model():
    good, bad = runs(a=[0.9, 0.8, 0.9], b=[0.1] * 3), runs(a=[0.1] * 3, b=[0.2] * 3)
    kinds = judge(differences(pd.concat([good, bad.assign(model="olmoe")]), ABOVE), ABOVE)
    instances = judge(differences(pd.concat([good, bad.assign(model="tiny_b")]), ABOVE), ABOVE)
    assert kinds.verdict == "does not hold" and instances.verdict == "undecided"
    assert kinds.part == names.model_label("olmoe") and kinds.difference == pytest.approx(-0.1), "the part that decides"
    assert instances.part == "" and len(instances.values) == 2, "two base models are too few"
    few = judge(differences(pd.concat([good, runs(a=[0.9], b=[0.1]).assign(model="olmoe")]), ABOVE), ABOVE)
    assert few.verdict == "undecided" and len(few.values) == 1, "one run of a kind"


def test_a_statement_about_each_objective_needs_every_one():
    good, bad = runs(a=[0.9, 0.8, 0.9], b=[0.1] * 3), runs(a=[0.1] * 3, b=[0.2] * 3)
    pairs = differences(pd.concat([good, bad.assign(objective="gd")]), ABOVE)
    assert judge(pairs, ABOVE).verdict != "does not hold", "all together it is not refuted"
    each = judge(pairs, stated(each_objective=True))
    assert each.verdict == "does not hold" and each.part == "GD"
    few = differences(pd.concat([good, runs(a=[0.9], b=[0.1]).assign(objective="gd")]), ABOVE)
    assert judge(few, stated(each_objective=True)).verdict == "undecided", "one run under gd"


def test_base_models_are_the_units_where_there_are_three():
    """Many runs of three base models that disagree decide nothing; taken as independent they would."""
    of = {"tiny_a": 0.6, "tiny_b": 0.55, "tiny_c": 0.1}
    data = pd.concat([runs(a=[high, high - 0.01] * 4, b=[0.0] * 8).assign(model=m) for m, high in of.items()])
    found = judge(differences(data, ABOVE), ABOVE)
    assert len(found.values) == 3 and found.unit == "base model" and found.verdict == "undecided"
    assert len(found.runs) == 24
    two, one = (
        judge(differences(data[data.model.isin(of)], ABOVE), ABOVE) for of in (["tiny_a", "tiny_b"], ["tiny_a"])
    )
    assert two.verdict == "undecided", "less data decides no more"
    assert one.verdict == "holds" and one.unit == "run" and len(one.values) == 8
    elsewhere = data.assign(benchmark=data.model.map({"tiny_c": "wmdp_tiny_1"}).fillna("wmdp_tiny"))
    assert judge(differences(elsewhere, ABOVE), ABOVE)[4:] == found[4:], "benchmarks of one kind are pooled"


def test_worlds_as_units_count_each_once():
    """Two base models of each of three worlds: alike within a world, so that six of them say less than six do."""
    level = {"tiny_a": 0.6, "tiny_b": 0.61, "tiny_c": 0.2, "tiny_d": 0.21, "tiny_e": 0.35, "tiny_f": 0.36}
    worlds = ["wmdp_tiny", "wmdp_tiny", "wmdp_tiny_1", "wmdp_tiny_1", "wmdp_tiny_2", "wmdp_tiny_2"]
    of_each = [
        runs(a=[high], b=[0.0]).assign(model=model, benchmark=world)
        for (model, high), world in zip(level.items(), worlds, strict=True)
    ]
    pairs = differences(pd.concat(of_each), ABOVE)
    models, by_fact_set = judge(pairs, ABOVE), judge(pairs, ABOVE, by_fact_set=True)
    assert by_fact_set.values.tolist() == pytest.approx([0.605, 0.205, 0.355])
    assert (
        models.verdict == "holds"
        and by_fact_set.verdict == "undecided"
        and models.difference == pytest.approx(by_fact_set.difference)
    )


def test_objectives_are_told_apart():
    both = pd.concat([runs(a=[0.5], b=[0.4]), runs(a=[0.3], b=[0.4]).assign(objective="gd")])
    assert claims._by_objective(differences(both, ABOVE), ABOVE) == "GD -0.10, RMU +0.10"


def test_the_shown_interval_is_that_of_the_verdict():
    data = runs(a=[0.61, 0.57, 0.59], b=[0.5] * 3)
    pairs = differences(data, ABOVE)
    at = {alpha: judge(pairs, ABOVE, alpha) for alpha in (0.05, 0.05 / 8)}
    assert at[0.05].verdict == "holds" and at[0.05].low > 0
    assert at[0.05 / 8].verdict == "undecided" and at[0.05 / 8].low <= 0


def test_the_primary_claims_are_a_family_of_all_that_were_named(monkeypatch):
    """An effect that 0.05 would let through is undecided, also while no other claim of the family has been measured."""
    data = runs(unconstrained=[0.42, 0.44, 0.46])
    found = all_verdicts(data).set_index("claim").loc["routing_collapses"]
    assert found.primary and found.level == pytest.approx(0.05 / len(primary_claims()))
    assert found.level < found.p < 0.05 and found.verdict == "undecided" and found.high > 0
    assert found.to_decide.startswith("about ") and found.to_decide.endswith(" runs")
    clear = all_verdicts(runs(unconstrained=[0.1, 0.101, 0.102])).set_index("claim").loc["routing_collapses"]
    assert clear.verdict == "holds"
    changed = load_claims()
    changed["routing_collapses"] = changed["routing_collapses"].model_copy(update={"right": 0.6})
    for claims_now in (changed, {name: row for name, row in changed.items() if name != "a_stable"}):
        monkeypatch.setattr(claims, "load_claims", lambda now=claims_now: now)
        with pytest.raises(ValueError, match="a primary claim was changed"):
            primary_claims()
        with pytest.raises(ValueError, match="a primary claim was changed"):
            primary_claims("replication")


def on_models(**values):
    """Routing stability of one run of each of several base models."""
    return pd.concat(runs(unconstrained=[value]).assign(model=f"tiny_{model}") for model, value in values.items())


def test_further_base_models_test_the_papers_primary_claims_by_themselves():
    again = primary_claims("replication")
    assert set(again) == {name for name in primary_claims() if load_claims()[name].line != "ours"}
    before, more = on_models(a=0.61, b=0.64, c=0.66), on_models(g=0.41, h=0.42, i=0.43)
    table = replication_table(before, more, "replication")
    shown = {label: [cell.text for cell in cells] for label, cells, _ in table.rows}
    asked, first, these, both = shown.pop(load_claims()["routing_collapses"].text)
    assert asked == "< 0.5" and first.startswith("0.64 (") and first.endswith("n = 3: undecided")
    assert these.startswith("0.42 (") and these.endswith("n = 3: holds"), "without the first base models"
    assert both.startswith("0.53 (") and both.endswith("n = 6"), "an estimate, no verdict"
    assert len(shown) == len(again) - 1 and all(cells[1:] == ["–"] * 3 for cells in shown.values())
    row = table.data.set_index("claim").loc["routing_collapses"]
    assert row.level == pytest.approx(0.05 / len(again)) and row.both_units == 6
    assert row.both_high - row.both_low == pytest.approx(2 * student(pd.Series([0.61, 0.64, 0.66, 0.41, 0.42, 0.43])))


def test_a_claim_of_one_family_is_judged_there_alone():
    own = {name for name, claim in load_claims().items() if claim.only_in == "wide"}
    assert own and own < set(primary_claims("wide"))
    data = on_models(a=0.1)
    assert own.isdisjoint(all_verdicts(data).claim) and own < set(all_verdicts(data, "wide").claim)
    assert set(all_verdicts(data, "wide").query("primary").claim) == set(primary_claims("wide"))


def test_of_several_parts_an_undecided_one_shows_its_interval_at_the_level_of_the_claim():
    parts = pd.concat(
        [runs(a=[0.6, 0.5, 0.9], b=[0.5] * 3), runs(a=[0.9, 0.8, 0.7], b=[0.1] * 3).assign(objective="gd")]
    )
    claim = stated(each_objective=True)
    found = judge(differences(parts, claim), claim)
    alone = judge(differences(runs(a=[0.6, 0.5, 0.9], b=[0.5] * 3), ABOVE), ABOVE)
    assert found.verdict == "undecided" and found.part == "RMU"
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high))


def test_what_would_decide_a_claim_that_was_not_measured():
    data = runs(unconstrained=[0.3, 0.7, 0.4])
    told = all_verdicts(data).set_index("claim").to_decide
    assert (
        told["drift_caps_a"] == "runs of expert_specific" and told["muse_routing_collapses"] == "runs of unconstrained"
    )
    apart = runs(expert_specific_paper=[0.6] * 3).assign(model="tiny_b")
    assert all_verdicts(pd.concat([data, apart])).set_index("claim").to_decide["a_above_none"] == (
        "runs of both on one base model"
    )
