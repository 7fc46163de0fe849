"""Steps that the script measures are those of `gripmoe unlearn`; here of a small model on the CPU."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from gripmoe.config.project import Project

WORKFLOW = Path(__file__).parents[2] / "workflow"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("measure_steps", WORKFLOW / "measure_steps.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = Project(WORKFLOW / "config", "single_gpu")
    sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
    config = small.models["olmoe"].config | sizes | dict(intermediate_size=16, num_experts=8, num_experts_per_tok=2)
    small.models = {
        **small.models,
        "olmoe": small.models["olmoe"].model_copy(update={"config": config, "id": "nobody/nothing"}),
    }
    short = small.benchmarks["wmdp_cyber"].model_copy(update={"max_length": 12})
    small.benchmarks = {**small.benchmarks, "wmdp_cyber": short}
    monkeypatch.setattr(module, "Project", lambda *_: small)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return module


def test_a_row_for_every_step_also_for_one_that_fails(script, tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    table = tmp_path / "steps.csv"
    methods = ["unconstrained", "expert_specific", "expert_specific_paper"]
    arguments = ["--models", "olmoe", "--objectives", "gd", "rmu", "--methods", *methods, "--output", str(table)]
    monkeypatch.setattr(sys, "argv", ["measure_steps.py", *arguments])
    script.main()
    rows = list(csv.DictReader(table.open()))
    assert [(row["objective"], row["method"]) for row in rows] == [(o, m) for o in ("gd", "rmu") for m in methods]
    for row in rows[:3]:
        assert not row["error"] and float(row["seconds"]) > 0 and float(row["plain_seconds"]) > 0
        assert row["tokens"] == str(4 * 12) and bool(row["stage_2_rate"]) == (row["method"] != "unconstrained")
    assert all("layer: olmoe has layers 0 to 2 (got 7)" in row["error"] for row in rows[3:])


def test_bases_span_the_tokens_that_each_expert_serves(script):
    from gripmoe.geometry.routing import SelectionRule, route

    class Model:
        model, rule = torch.nn.Linear(1, 1), lambda self, layer: SelectionRule(2)

    Model.model.device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    seen = route(torch.randn(20, 64, generator=generator), torch.randn(8, 64, generator=generator), SelectionRule(2))
    basis = script._spans(Model(), {0: seen})[0]
    fixed_NE = SelectionRule(2).fixed(seen.scores_NE, seen.top_k_Nk)
    assert basis.ranks.tolist() == fixed_NE.sum(dim=0).tolist()
    for expert in range(8):
        served = seen.x_Nd[fixed_NE[:, expert]]
        left = basis.of(slice(expert, expert + 1)).remainder(served[None])
        assert left.norm() < 1e-4 * served.norm()
