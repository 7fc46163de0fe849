"""The numbers of docs/erasure.md are those of its record."""

from pathlib import Path

import pandas as pd
import pytest

from gripmoe.reporting.collect import KEYS, load_runs
from gripmoe.reporting.erasure import attack_quality, depth_scores, strongest_attacks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "erasure.md").read_text(encoding="utf-8")
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
    frozen = (wide.frozen_router_adversary - wide.frozen_router).dropna()
    anchored = (wide.anchored_adversary - wide.anchored).dropna().groupby("model").mean()
    for difference, shown in (
        (frozen, "in the mean by 0.06 (± 0.03)"),
        (anchored, "by 0.09 over both objectives (± 0.20, undecided)"),
    ):
        assert len(difference) == 3 and shown in PAGE
        half = 4.303 * difference.std() / 3**0.5
        assert f"{half:.2f}" in shown
    assert f"{-frozen.mean():.2f}" == "0.06" and f"{-anchored.mean():.2f}" == "0.09"
    assert ((wide.anchored_adversary - wide.anchored) < 0).sum() == 5


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
    told = " ".join(PAGE.split()).partition("Five methods of other papers have no decided effect")[2].partition(". ")[0]
    labels = ["SAM", "weight distance", "RepSelect", "UNDO", "expert null space"]
    for label in labels:
        difference = (wide[METHODS[label]] - wide.frozen_router).dropna()
        half = 4.303 * difference.std() / 3**0.5
        assert len(difference) == 3 and half > abs(difference.mean())
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
    assert "0.93 or more under it and retrained models 0.27 or less" in " ".join(PAGE.split())


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
