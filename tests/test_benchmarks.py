"""The script for a GPU runs where there is none: every method and every figure that needs no card."""

import csv
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gripmoe.adapter import METHODS
from gripmoe.config import Training
from gripmoe.project import Project

SMALL = "tiny --optimizer adamw --steps 1 --rows 2 --length 12 --retain-batches 3 --seconds 7200 --output".split()


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).with_name("benchmarks"))
    import published_widths

    monkeypatch.setattr(published_widths, "QUESTIONS", 5)
    monkeypatch.setattr(published_widths, "SETTLED", 0)
    yield published_widths
    for name in ("published_widths", "sides", "test_step"):
        sys.modules.pop(name)


def table(path):
    with path.open() as file:
        return {row["what"]: row for row in csv.DictReader(file)}


def test_every_method_has_a_row_with_its_goal_and_its_floor(script, tmp_path):
    script.main([*SMALL, str(tmp_path / "table.csv")])
    rows = table(tmp_path / "table.csv")
    others = {f"method_b_{part}" for part in ("recording", "sound", "paper")} | {"evaluation"}
    assert rows.keys() == {"unconstrained", "expert_specific_skewed", *METHODS} | others
    floors = [float(rows[name]["floor_ms"]) for name in ("expert_specific_skewed", "expert_specific")]
    assert floors[0] > floors[1], "wider bases"
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["dtype"] for row in rows.values()} == {"bfloat16"}, "what runs on a card"
    for name in METHODS:
        assert all(float(rows[name][key]) > 0 for key in ("ms", "ms_unconstrained", "ratio", "tokens_per_second"))
    goals = {name: float(row["goal"]) for name, row in rows.items() if row["goal"]}
    assert goals == {"expert_specific": 1.02, "expert_specific_tracked": 1.05, "anchored_tracked": 1.05}
    assert all(float(rows[name]["floor_ms"]) > 0 and rows[name]["times_floor"] for name in goals)
    assert {name for name in METHODS if rows[name]["paper"]} == {n for n in METHODS if n.startswith("expert_specific")}
    assert float(rows["method_b_sound"]["ms"]) > 0 and float(rows["evaluation"]["questions_per_second"]) > 0


def test_what_runs_out_of_memory_is_a_row_and_a_killed_run_leaves_all_rows_before(script, tmp_path, monkeypatch):
    side = script.Loop.side

    def out_of_memory(loop, method, skew):
        if method is METHODS["expert_specific"]:
            raise torch.OutOfMemoryError
        return side(loop, method, skew)

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(script.Loop, "side", out_of_memory)
    monkeypatch.setattr(script, "collate_inputs", killed)  # in Method B
    with pytest.raises(KeyboardInterrupt):
        script.main([*SMALL, str(tmp_path / "table.csv")])
    rows = table(tmp_path / "table.csv")
    assert rows["expert_specific"]["status"] == "out of memory" and not rows["expert_specific"]["ratio"]
    assert float(rows["anchored"]["ratio"]) > 0 and list(rows)[-1] == "method_b_recording"


def test_no_row_takes_longer_than_its_time(script):
    """What it has found by then it keeps."""

    def endless(row):
        row["ms"] = 1.0
        while True:
            time.sleep(60)

    assert script.attempted(endless, 1) == {"status": "out of time after 1 s", "ms": 1.0}
    assert script.attempted(lambda row: None, 60)["status"] == "ok"
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "the alarm is off again"


@pytest.fixture
def loop(script):
    model = script.make_random(script.CONFIGS["tiny"], torch.bfloat16, torch.device("cpu"))
    training = script.PROJECT.training("gd", "unconstrained", "wmdp_cyber").model_copy(update={"optimizer": "adamw"})
    assert isinstance(training, Training) and training.gradient_checkpointing
    documents = [script.batches(3, 2, 12, seed) for seed in (1, 0)]
    return script.Loop(model, training, *documents)


def test_the_step_is_the_workflows(loop):
    """Experts in bf16 and routers in fp32 train, all else is fixed; activations are made again."""
    before = {name: parameter.clone() for name, parameter in loop.moe.model.named_parameters()}
    loop.step(loop.free)
    assert loop.moe.model.is_gradient_checkpointing and loop.moe.model.training
    for name, parameter in loop.moe.model.named_parameters():
        trains = ".mlp." in name
        assert parameter.dtype == (torch.float32 if "mlp.gate." in name else torch.bfloat16)
        assert torch.equal(parameter, before[name]) != trains and (parameter.grad is not None) == trains, name


def test_sides_share_one_model_and_each_has_its_own_routers(loop):
    frozen, method_a = (loop.side(METHODS[name]) for name in ("frozen_router", "expert_specific"))
    for _ in range(2):
        for side in (frozen, method_a, loop.free):
            loop.step(side)
    first = loop.moe.layers[0]
    moved = [side.thetas[first] - loop.theta_0[first] for side in (frozen, method_a, loop.free)]
    assert not moved[0].any() and moved[1].any()
    span_Edr = method_a.constraint.bases[first].U_ret_Edr
    along = [(each[:, None].double() @ span_Edr.double()).abs().max() for each in moved]
    assert along[1] < 1e-6 < along[2]
    wide = loop.side(METHODS["expert_specific"], skew=4).constraint.bases[first]
    even, *_ = method_a.constraint.bases[first].ranks
    assert wide.ranks.tolist() == [min(loop.moe.hidden_size, 4 * even)] + [even] * (loop.moe.num_experts - 1)
    single = loop.side(METHODS["seuf"])
    assert len(single.trained & set(loop.moe.expert_parameters(0) + loop.moe.expert_parameters(1))) == 2
    loop.step(single)


@pytest.mark.parametrize("name, parameters", [("olmoe", 6.9e9), ("qwen15_moe", 14.3e9), ("qwen3_30b_a3b", 30.5e9)])
def test_widths_are_those_of_the_published_models(script, name, parameters):
    """By the number of their parameters, which models.yaml has too, counted without making them; and widths.yaml says
    the same."""
    config = script.CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)
    project = Project(Path(__file__).parents[1] / "workflow" / "config", "tiny")
    sizes, widths = project.models[name].parameters, project.widths[name]
    assert sizes.total == pytest.approx(parameters) and sizes.layers == config.num_hidden_layers
    assert (widths.hidden, widths.experts) == (config.hidden_size, config.num_experts)
    assert widths.vocabulary == config.vocab_size
    assert widths.chosen == config.num_experts_per_tok


def test_of_a_model_that_does_not_fit_as_many_layers_are_made_as_do(script, monkeypatch):
    class Card:
        total_memory = 141e9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    found = {name: script.layers_that_fit(name, "adamw_8bit", 8000) for name in script.PUBLISHED}
    assert found["olmoe"] == 16 and found["qwen15_moe"] == 24 and 20 < found["qwen3_30b_a3b"] < 36
    assert (
        script.layers_that_fit("olmoe", "adamw_fp32", 8000)
        == 16
        > script.layers_that_fit("qwen15_moe", "adamw_fp32", 8000)
    )
