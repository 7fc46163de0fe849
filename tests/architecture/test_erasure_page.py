"""The numbers of docs/erasure.md are those of its record."""

import re
from math import exp, log
from pathlib import Path

import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from gripmoe.reporting.collect import KEYS, load_runs
from gripmoe.reporting.erasure import ATTACKS, attack_quality, depth_scores, harmless, strongest_attacks
from gripmoe.reporting.uncertainty import holm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "erasure.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
RECORD = ROOT / "docs" / "record" / "erasure"
RUNS = load_runs(RECORD / "runs.csv")
ATTEMPTS = pd.read_csv(RECORD / "attempts.csv")
METHODS = {
    "frozen router": "frozen_router",
    "anchored": "anchored",
    "frozen router, under attack": "frozen_router_adversary",
    "anchored, under attack": "anchored_adversary",
    "anchored, under attack ×3": "anchored_adversary_x3",
    "frozen router, under attack ×3": "frozen_router_adversary_x3",
    "SAM": "sam",
    "weight distance": "weight_distance",
    "RepSelect": "repselect",
    "MUDMAN": "mudman",
    "sign descent": "sign_descent",
    "UNDO": "undo",
    "expert null space": "expert_null_space",
}


OTHER_PAPERS = ["SAM", "weight distance", "RepSelect", "MUDMAN", "sign descent", "UNDO", "expert null space"]
FURTHER = load_runs(ROOT / "docs" / "record" / "erasure_further" / "runs.csv")


def excesses(objective):
    """By base model and method."""
    found = strongest_attacks(RUNS)
    return found[found.objective == objective].pivot(index="model", columns="method", values="excess")


def rows(heading: str) -> list[list[str]]:
    table = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    tables = re.findall(r"^\|.*\n\|---.*\n((?:\|.*\n)+)", table, flags=re.MULTILINE)
    lines = "".join(tables).splitlines()
    return [[cell.strip(" *\\") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("row", rows("What holds"), ids=lambda row: row[0])
def test_the_table_is_the_records(row):
    label, retain, routing, excess, tokens = row
    objective, _, method = label.partition(", ")
    named = METHODS.get(method, "retrained")
    found = strongest_attacks(RUNS)
    found = found[found.method == named]
    found = found if named == "retrained" else found[found.objective == objective.lower()]
    stability = RUNS[(RUNS.metric == "routing_stability") & RUNS.set_index(found.columns[:4].tolist()).index.isin(
        found.set_index(found.columns[:4].tolist()).index
    )].value  # fmt: skip
    assert f"{found.retain_accuracy.mean():.2f}" == retain
    assert f"{stability.mean():.2f}" == routing
    assert f"{found.excess.mean():.2f}" == excess
    assert tokens == ("–" if named == "retrained" else f"{found.tokens.mean() / 1e6:.2f} million")


def test_paired_differences_are_the_records():
    wide = strongest_attacks(RUNS).pivot(index=["model", "objective"], columns="method", values="excess")
    pairs = (wide.anchored_adversary - wide.anchored).dropna()
    under_unlikelihood = wide.xs("unlikelihood", level="objective")
    differences = {
        "mean by {} (± {}).": wide.frozen_router - wide.frozen_router_adversary,
        "With the anchor it falls by {} (± {}) under unlikelihood": -pairs.xs("unlikelihood", level="objective"),
        "by {} (± {}, undecided).": -pairs.groupby("model").mean(),
        "has less under this attacker by {} (± {}).": under_unlikelihood.frozen_router
        - under_unlikelihood.frozen_router_adversary_x3,
        "its excess is {} (± {}) above that of a frozen router": under_unlikelihood.anchored
        - under_unlikelihood.frozen_router,
    }
    faster = (wide.anchored - wide.anchored_adversary_x3).dropna().groupby("objective")
    assert {objective: len(runs) for objective, runs in faster} == {"gd": 3, "npo": 3, "unlikelihood": 3}
    faster = {objective: runs for objective, runs in faster}
    differences |= {
        "anchor alone by {} (± {}),": faster["unlikelihood"],
        "), {} (± {}) and": faster["npo"],
        "and {} (± {}). It retains": faster["gd"],
    }
    for shown, difference in differences.items():
        difference = difference.dropna()
        half = 4.303 * difference.std() / 3**0.5
        assert len(difference) == 3
        assert shown.format(f"{difference.mean():.2f}", f"{half:.2f}") in TEXT
    assert f"in {(pairs < 0).sum()} of {len(pairs)} pairs" in TEXT
    others = [under_unlikelihood[METHODS[label]] - under_unlikelihood.frozen_router for label in OTHER_PAPERS]
    under_npo = excesses("npo")
    others.append(under_npo.sam - under_npo.frozen_router)
    values = pd.Series([ttest_1samp(each.dropna(), 0).pvalue for each in (*differences.values(), *others)])
    assert len(values) == 16 and not (values <= holm(values, 0.05)[values.index]).any()
    assert "Sixteen intervals of this list compare excesses. After Holm's correction none excludes 0." in TEXT


ROUTED = load_runs(ROOT / "docs" / "record" / "routed" / "runs.csv")


@pytest.mark.parametrize("row", rows("An upper bound"), ids=lambda row: row[0])
def test_the_upper_bound_is_the_records(row):
    label, *shown, excess = row
    methods = {"with all experts": "original", "four experts removed": "remove_experts", "retrained model": "retrained"}
    runs = ROUTED[ROUTED.method == methods[label]]
    columns = "forget_accuracy", "retain_accuracy", "routing_stability", "relearned_after_20"
    assert shown == [f"{runs[runs.metric == column].value.mean():.2f}" for column in columns]
    found = strongest_attacks(ROUTED)
    found = found[found.method == "remove_experts"].excess
    assert excess == (f"{found.mean():.2f}" if label == "four experts removed" else "–")


def test_what_the_upper_bound_says_of_single_models_is_the_records():
    found = strongest_attacks(ROUTED)
    found = found[found.method == "remove_experts"].excess
    assert "one run each, is {:.2f}, {:.2f} and {:.2f}.".format(*found) in PAGE
    runs = ROUTED[ROUTED.metric == "restored_experts_worst_layer"].groupby("method").value.mean()
    assert f"experts return {runs.remove_experts:.2f}** ({runs.retrained:.2f} in" in PAGE


def test_what_the_anchor_adds_to_relearning_is_the_records():
    runs = load_runs(ROOT / "docs" / "record" / "runs.csv")
    runs = runs[(runs.metric == "relearned_after_20") & (runs.objective != "rmu")]
    wide = runs.pivot(index=["model", "objective", "seed"], columns="method", values="value")
    difference = (
        (wide.anchored - wide.frozen_router).dropna().groupby(["model", "objective"]).mean().groupby("model").mean()
    )
    half = 2.571 * difference.std() / 6**0.5
    assert len(difference) == 6
    assert f"the difference is {difference.mean():.2f} (± {half:.2f})" in " ".join(PAGE.split())


def test_differences_of_other_papers_methods_are_the_records():
    told = TEXT.partition("only MUDMAN lowers the excess much.")[2].partition("RepSelect and the expert")[0]
    lowered = []
    for label, objective in [*((label, "unlikelihood") for label in OTHER_PAPERS), ("under NPO SAM", "npo")]:
        wide = excesses(objective)
        difference = (wide[METHODS[label.removeprefix("under NPO ")]] - wide.frozen_router).dropna()
        half = 4.303 * difference.std() / 3**0.5
        assert len(difference) == 3 and f"{label} {difference.mean():+.2f} (± {half:.2f})" in told
        lowered += [label] if difference.mean() < -half else []
    assert lowered == ["MUDMAN"]
    missed = RUNS[(RUNS.metric == "reached") & (RUNS.value == 0)].groupby("method").model.nunique()
    assert (missed.repselect, missed.expert_null_space) == (2, 2)


def test_attempts_are_counted_and_quoted():
    assert f"has all {len(ATTEMPTS) - 1} attempts" in PAGE
    known = ATTEMPTS[["forget_accuracy", "retain_accuracy", "relearned_after_10"]].map(lambda value: f"{value:.2f}")
    known = set(known.itertuples(index=False, name=None))
    assert not [row for row in rows("What was tried") if tuple(row[1:]) not in known]


def test_attacks_tell_models_apart_as_the_page_says():
    quality = {label: [cell.value for cell in cells] for label, cells, _ in attack_quality(RUNS).rows}
    one_layer = quality.pop("1 layer")
    assert f"{one_layer[1]:.2f}" in PAGE
    assert f"{min(values[0] for values in quality.values()):.2f}" == "0.93"
    assert f"{max(values[1] for values in quality.values()):.2f}" == "0.27"
    assert "0.93 or more under each and retrained models 0.27 or less" in TEXT
    assert len(quality) == 14 and "**All 14 attacks are faithful.**" in TEXT
    assert max(values[4] for values in quality.values()) < 0.025


def test_the_table_of_attacks_is_the_records():
    table = attack_quality(RUNS)
    shown = ["knows", "never knew", "moves", "moves unlearned", "finds"]
    found = [dict(zip(table.columns, cells, strict=True)) for _, cells, _ in table.rows]
    assert [row[1:] for row in rows("What the attacks are worth")] == [[c[name].text for name in shown] for c in found]


def test_what_harmless_finetuning_does_is_the_records():
    wide = RUNS.pivot_table(index=KEYS, columns="metric", values="value").reset_index()
    wide = wide[~wide.method.isin(["original", "retrained"])]
    raised = {name: wide[harmless(name, "finetuned")] - wide[name] for name in ATTACKS}
    assert sum(change.mean() > 0.02 for change in raised.values()) > len(ATTACKS) / 2
    assert f"in single runs by up to {max(change.max() for change in raised.values()):.2f}." in TEXT
    low_rank = wide[wide.objective == "rmu"].relearned_lora_after_20.min()
    assert f"low-rank relearning returns {low_rank:.2f} or more" in TEXT


def test_what_is_left_of_the_attacked_anchor_is_the_records():
    wide = RUNS.pivot_table(index=KEYS, columns="metric", values="value").reset_index()
    ours = wide[(wide.method == "anchored_adversary") & (wide.objective == "unlikelihood")].set_index("model")
    retrained = wide[wide.method == "retrained"].set_index("model")
    low_rank = [each.relearned_lora_after_20.mean() for each in (ours, retrained)]
    told = "answers {:.2f} of the other forget questions, and the retrained models {:.2f}.".format(*low_rank)
    assert f"`anchored_adversary` (unlikelihood) {told}" in TEXT
    others = [
        name for name in ATTACKS if not name.startswith(("relearned_after", "relearned_lora", "relearned_routers"))
    ]
    assert f"{(ours[others] - retrained[others]).max().max():.2f}" == "0.05"


@pytest.mark.parametrize("row", rows("Once more, on six further base models"), ids=lambda row: row[0])
def test_the_further_table_is_its_records(row):
    label, *shown, excess = row
    method = METHODS.get(label, "retrained")
    runs = FURTHER[FURTHER.method == method]
    columns = "forget_accuracy", "retain_accuracy", "routing_stability", "relearned_after_20"
    assert runs.model.nunique() == 6
    assert shown == [f"{runs[runs.metric == column].value.mean():.2f}" for column in columns]
    found = strongest_attacks(FURTHER)
    assert excess == f"{found[found.method == method].excess.mean():.2f}"


def test_the_four_questions_have_the_answers_of_their_record():
    """Student's over six base models: 2.571. With Holm's correction MUDMAN's lower excess alone stays."""
    found = strongest_attacks(FURTHER)
    wide = found.pivot(index="model", columns="method", values="excess")
    told = TEXT.partition("## Once more")[2].partition("## An upper bound")[0]

    def interval(values):
        half = 2.571 * values.std() / 6**0.5
        return values.mean(), half

    lower = {
        "mudman": "{:.2f} (± {:.2f}, p = {:.3f}; the",
        "anchored_adversary_x3": "{:.2f} (± {:.2f}, p = {:.3f}), which",
    }
    values = []
    for method, shown in lower.items():
        difference = wide.frozen_router - wide[method]
        values += [ttest_1samp(difference, 0).pvalue, ttest_1samp(wide[method], 0.05).pvalue]
        assert shown.format(*interval(difference), values[-2]) in told
        mean, half = interval(wide[method])
        assert mean - half < 0.05 < mean + half, "undecided"
        assert f"({mean - half:.2f} to {mean + half:.2f})" in told
    values = pd.Series(values)
    assert (values <= holm(values, 0.05)[values.index]).tolist() == [True, False, False, False]
    above = [interval(wide[method] - wide.retrained) for method in ("mudman", "anchored_adversary_x3")]
    assert "MUDMAN has {:.2f} more (± {:.2f}) and ours {:.2f} more (± {:.2f}).".format(*above[0], *above[1]) in told
    assert all(mean < half for mean, half in above), "not told from the control"
    attacked = wide.frozen_router_adversary_x3
    assert "an excess of {:.2f} (± {:.2f}).".format(*interval(attacked)) in told
    assert interval(attacked - 0.05)[0] > -interval(attacked)[1], "undecided"
    less = [wide[method] - attacked for method in ("frozen_router", "mudman", "anchored_adversary_x3")]
    shown = [number for each in less for number in interval(each)]
    assert (
        "without an attacker by {:.2f} (± {:.2f}), less than MUDMAN's by {:.2f} (± {:.2f}) and "
        "less than ours by {:.2f} (± {:.2f})."
    ).format(*shown) in told
    worlds = found.pivot_table(index="benchmark", columns="method", values="excess")
    lower = [worlds.frozen_router - worlds[method] for method in ("mudman", "anchored_adversary_x3")]
    shown = [(each.mean(), 4.303 * each.std() / 3**0.5) for each in lower]
    assert "by {:.2f} (± {:.2f}) and {:.2f} (± {:.2f}).".format(*shown[0], *shown[1]) in told
    layer = FURTHER[FURTHER.metric == "restored_experts_worst_layer"].groupby("method").value.mean()
    shares = layer.mudman, layer.anchored_adversary_x3, layer.retrained
    assert "{:.2f} of MUDMAN's models and {:.2f} of ours ({:.2f} of the retrained ones)".format(*shares) in told
    tokens = FURTHER[FURTHER.metric == "tokens"].groupby("method").value.mean()
    assert tokens[["mudman", "anchored_adversary_x3"]].max() < 0.2 * (1.75e6 + 4.1e6)


def test_the_depths_are_what_was_measured():
    """What `docs/quotes.yaml` does not enter."""
    measured = pd.read_csv(RECORD / "readable_depth.csv")
    text = " ".join(PAGE.partition("## How deep a fact is gone")[2].partition("\n## ")[0].split())

    def read(method, metric, objective="none"):
        rows = measured[(measured.method == method) & (measured.metric == metric) & (measured.objective == objective)]
        return rows[~rows.benchmark.str.contains("erasure")].groupby("model").value.mean().mean()

    after_two = "read_above_layer_1", "retain_read_above_layer_1"
    unlearned = [read("unconstrained", metric, "npo") for metric in after_two]
    retrained = [read("retrained", metric) for metric in after_two]
    assert "answers {:.2f} of the forget questions and {:.2f} of the retain questions.".format(*unlearned) in text
    assert "From the retrained model's it answers {:.2f} and {:.2f}.".format(*retrained) in text
    assert f"original answers {read('erase_words', 'retain_read_above_layer_1'):.2f} then." in text

    depths = depth_scores(measured)
    depths = depths[~depths.method.isin(["original", "retrained", "erase_words"])]
    wide = load_runs(RECORD.parent / "runs.csv").pivot_table(index=KEYS, columns="metric", values="value").reset_index()
    # The record's runs of the second seed are others than those whose weights were measured.
    forgot = depths.merge(wide[(wide.forget_accuracy < 0.3) & (wide.seed == 0)], on=KEYS)
    relearned = forgot.depth.corr(forgot.relearned_after_20, "spearman")
    by = {name: (g.depth.corr(g.relearned_after_20, "spearman"), len(g)) for name, g in forgot.groupby("objective")}
    assert f"Over the {len(forgot)} measured runs of the record's first seed" in text
    told = (
        "is {:.2f}: {:+.2f} under GD ({} runs), {:.2f} under KL ({}), {:.2f} under NPO ({}) and {:.2f} under RMU ({})."
    )
    assert told.format(relearned, *by["gd"], *by["kl"], *by["npo"], *by["rmu"]) in text
    here = depths.merge(strongest_attacks(RUNS), on=KEYS)
    excess, forgetting = (here.depth.corr(here[name], "spearman") for name in ("excess", "forget_accuracy"))
    assert f"Over {len(here)} runs of this page" in text and f"is {excess:.2f} between depth and excess." in text
    assert f"are less deep too ({forgetting:.2f})." in text


EXPERTS = pd.read_csv(RECORD / "expert_attribution.csv")


@pytest.mark.parametrize("row", rows("Which experts the answers depend on"), ids=lambda row: row[0])
def test_the_agreement_of_experts_is_what_was_measured(row):
    label, *shown = row
    method = METHODS.get(label.removeprefix("unlikelihood, "), "retrained")
    for questions, value in zip(("forget", "retain"), shown, strict=True):
        wide = EXPERTS.pivot(index=["model", "layer", "expert"], columns="method", values=questions)
        agreements = [of_model[method].corr(of_model.original, "spearman") for _, of_model in wide.groupby("model")]
        assert len(agreements) == 3 and f"{sum(agreements) / 3:.2f}" == value


def test_the_concentration_of_facts_is_what_was_measured():
    """As many experts as have the entropy of the contributions when they contribute equally."""
    original = EXPERTS[EXPERTS.method == "original"]

    def experts(contributions):
        shares = contributions.clip(lower=0) / contributions.clip(lower=0).sum()
        return exp(-sum(share * log(share) for share in shares if share))

    forget, retain = (original.groupby("model")[questions].apply(experts).mean() for questions in ("forget", "retain"))
    assert f"as if {forget:.0f} experts shared them equally, and those to retain answers as if {retain:.0f} did" in TEXT
    low = original[original.layer < 2]
    shares = {f"{low[questions].sum() / original[questions].sum():.0%}" for questions in ("forget", "retain")}
    common = []
    for _, of_model in original.groupby("model"):
        first, second = (set(of_model[questions].nlargest(8).index) for questions in ("forget", "retain"))
        common.append(len(first & second))
    assert "forget answers {}, {} and {} are among the 8".format(*common) in TEXT
    assert shares == {"99%"} and "Of their sum 99 % is in the first two layers." in TEXT
