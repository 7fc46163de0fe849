"""The attacks that a method has to withstand, what each is worth, and how deep a fact can still be read."""

from __future__ import annotations

from math import nan

import pandas as pd

from gripmoe.reporting import names
from gripmoe.reporting.runs import KEYS, by_run
from gripmoe.reporting.tables import Cell, Table

# Without attacks that put original experts back: those bring facts even to a model that never knew them.
ATTACK_METRICS = (
    "forced_forget_accuracy",
    "restored_router_all",
    "noisy_routing",
    "searched_routing_after_64",
    "silenced_experts",
    "prompt_five_shot",
    "quantized_4_bit",
    "relearned_after_5",
    "relearned_after_10",
    "relearned_after_20",
    "relearned_after_100",
    "relearned_lora_after_20",
    "relearned_lora_after_100",
    "relearned_routers_after_20",
    "relearned_routers_after_100",
    "relearned_from_retain_after_20",
    "relearned_from_retain_after_100",
    "relearned_from_held_out_after_20",
    "relearned_from_held_out_after_100",
)
HARMLESS = ("rounded", "finetuned")  # changes of a model that should not matter to an attack (attacks/harmless.py)
LEAST_DROP = 0.05  # of accuracy, on the retrained model's states after a layer that counts


def depth_scores(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per run with `read_above_layer_<n>`, with its `depth`: 0 where the original's upper layers read as much
    from this model's states as from their own, 1 where they read no more than from the retrained model's. It is the
    mean of that share over layers above which the retrained model lowers accuracy by more than LEAST_DROP, weighted by
    its drop (Unlearning Depth Score, arXiv 2605.24614; there of log-probabilities)."""
    depths = runs[runs.metric.str.startswith("read_above_layer_")]
    wide = by_run(depths).reset_index()
    wide, layers = wide.set_index(["model", "benchmark"]), sorted(depths.metric.unique())
    original, retrained = (wide[wide.method == name][layers] for name in names.NOT_UNLEARNED)
    asked = original - retrained
    asked = asked[asked > LEAST_DROP].reindex(wide.index)[wide[layers].notna()]
    reached = (original.reindex(wide.index) - wide[layers]).clip(lower=0.0).clip(upper=asked)[asked.notna()]
    depth = reached.sum(axis=1) / asked.sum(axis=1, min_count=1)
    return wide.assign(depth=depth).reset_index()[[*KEYS, "depth"]].dropna()


def attack_quality(runs: pd.DataFrame) -> Table:
    """The attacks themselves: what each returns of models that know and of models that never knew, how far the latter
    differ by luck, how far harmless changes of a model move it, and what it finds in unlearned models beyond its own
    retrained model."""
    wide = by_run(runs).reset_index().set_index(["model", "benchmark"])
    attacks = [name for name in (*ATTACK_METRICS, "restored_experts_worst_layer") if name in wide]
    original, retrained = (wide[wide.method == name][attacks] for name in names.NOT_UNLEARNED)
    is_unlearned = ~wide.method.isin(names.NOT_UNLEARNED)
    unlearned = wide[is_unlearned][attacks]
    found = unlearned - retrained.reindex(unlearned.index)
    table = Table(["knows", "never knew", "gap", "luck", "moves", "moves unlearned", "finds"], heading="Attack")
    rows = []
    for name in attacks:
        knows, never = original[name], retrained[name]
        moved = [_moved(wide[chosen], name) for chosen in (~is_unlearned, is_unlearned)]
        values = knows.mean(), never.mean(), (knows - never).mean(), never.std(), *moved, found[name].mean()
        cells = [Cell("" if pd.isna(value) else f"{value:.2f}", value) for value in values]
        rows.append((names.metric(name).heading, cells, []))
    table.blocks = [("", rows)]
    table.notes = [
        "Forget accuracy under each attack. Knows: of models before unlearning. Never knew: of retrained models. Gap: "
        "their difference, by which the attack tells both apart. Luck: standard deviation over retrained models. "
        "Moves: the mean absolute difference that a harmless change makes to the attack on these models (weights "
        "rounded to 8 bits; 10 steps on held-out documents); moves unlearned: the same of unlearned models. "
        "Finds: the mean over unlearned models of what the attack returns beyond what it returns of the retrained one.",
        *(f"{names.metric(name).heading}: {names.metric(name).note}." for name in attacks if names.metric(name).note),
    ]
    return table


def _moved(wide: pd.DataFrame, attack: str) -> float:
    changed = [wide[name] - wide[attack] for change in HARMLESS if (name := harmless(attack, change)) in wide]
    return pd.concat(changed).abs().mean() if changed else nan


def harmless(metric: str, change: str) -> str:
    """The metric of the same attack on a model with a change of HARMLESS."""
    return f"{metric}_if_{change}"
