"""The numbers of docs/erasure.md are those of its record."""

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
    "SAM": "sam",
    "weight distance": "weight_distance",
    "RepSelect": "repselect",
    "UNDO": "undo",
    "expert null space": "expert_null_space",
}


OTHER_PAPERS = ["SAM", "weight distance", "RepSelect", "UNDO", "expert null space"]


def rows(heading: str) -> list[list[str]]:
    table = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
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
        "its excess is {} (± {}) above that of a frozen router": under_unlikelihood.anchored
        - under_unlikelihood.frozen_router,
    }
    for shown, difference in differences.items():
        difference = difference.dropna()
        half = 4.303 * difference.std() / 3**0.5
        assert len(difference) == 3
        assert shown.format(f"{difference.mean():.2f}", f"{half:.2f}") in TEXT
    assert f"in {(pairs < 0).sum()} of {len(pairs)} pairs" in TEXT
    others = [wide[METHODS[label]] - wide.frozen_router for label in OTHER_PAPERS]
    values = pd.Series([ttest_1samp(each.dropna(), 0).pvalue for each in (*differences.values(), *others)])
    survive = values <= holm(values, 0.05)[values.index]
    assert len(values) == 9 and survive.tolist() == [*[False] * 8, True], "that of the expert null space"


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
    wide = strongest_attacks(RUNS).pivot(index=["model", "objective"], columns="method", values="excess")
    told = TEXT.partition("No method of another paper lowers the excess.")[2].partition("RepSelect and the expert")[0]
    for label in OTHER_PAPERS:
        difference = (wide[METHODS[label]] - wide.frozen_router).dropna()
        half = 4.303 * difference.std() / 3**0.5
        assert len(difference) == 3 and difference.mean() > -half
        assert f"{label} {difference.mean():+.2f} (± {half:.2f})" in told
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
    assert f"the smallest is {unlearned_excess().min():.2f}." in TEXT


def unlearned_excess():
    found = strongest_attacks(RUNS)
    return found[found.method != "retrained"].excess


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
