"""The cache of bases as a world's own bases fill it."""

import pandas as pd
import torch

from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.moe.bases import save_bases
from gripmoe.moe.basis_cache import HOT_BASES, measure_tiers
from gripmoe.reporting.collect import COLUMNS
from gripmoe.reporting.mechanism import basis_cache

D, EXPERTS, LAYERS, RANK = 16, 10, 3, 4


def served(table):
    """Share of the accesses by tier, and what the tier holds, of each block of limits."""
    return [
        {label.split(":")[0]: (cells[3].value, round(1e6 * cells[1].value)) for label, cells, _ in entries}
        for _, entries in table.blocks
    ]


def world(folder, experts=EXPERTS):
    runs = pd.DataFrame([("m", "b", "gd", "expert_specific", 0, "forget_accuracy", 0.25)], columns=COLUMNS)
    runs.to_csv(folder / "runs_w.csv", index=False)
    bases = {layer: RetainBasis(torch.eye(D)[:, :RANK].repeat(experts, 1, 1)) for layer in range(LAYERS)}
    save_bases(folder / "m" / "b" / "bases" / "expert_specific.safetensors", bases, {})
    return folder / "runs_w.csv"


def test_a_tier_smaller_than_all_that_a_step_asks_for_serves_nothing(tmp_path):
    one = D * RANK * 4
    unlimited, paper, half = served(basis_cache(world(tmp_path), measure_tiers))
    total = LAYERS * EXPERTS * one
    assert unlimited == {"hot": (1.0, total), "warm": (0.0, total), "cold": (0.0, total)}
    assert paper == {"hot": (0.0, HOT_BASES * one), "warm": (1.0, total), "cold": (0.0, total)}
    assert half["warm"] == (0.0, total // 2) and half["cold"][0] == 1.0


def test_as_many_bases_as_are_hot_in_the_paper_are_served_from_there(tmp_path):
    """The control: what a step asks for fits."""
    _, paper, half = served(basis_cache(world(tmp_path, experts=HOT_BASES // LAYERS), measure_tiers))
    assert paper["hot"][0] == half["hot"][0] == 1.0


def test_without_bases_nothing_is_made_up(tmp_path):
    file = world(tmp_path)
    (tmp_path / "m" / "b" / "bases" / "expert_specific.safetensors").unlink()
    table = basis_cache(file, measure_tiers)
    assert not table.blocks and table.notes[0].startswith("Not measured")
