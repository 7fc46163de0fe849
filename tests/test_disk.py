"""Disk by hand: what stays, and what is there while training runs."""

import pytest

from gripmoe.disk import checkpoints_written, disk_needed
from gripmoe.files import write_json
from test_planning import changed

LARGE = "qwen3_30b_a3b"
QWEN, OLMOE = 61.0, 13.8  # GB of weights


def only(methods, **changes):
    """Of Qwen3-30B-A3B under GD with one seed, on two GPUs."""
    return changed("paper", **{"models": [LARGE], "methods": methods, "objectives": ["gd"], "seeds": [0], **changes})


def test_finished_cells_and_base_models():
    """Eleven methods under four objectives and three seeds, of two models; of three models of news, with the oracle and
    the base. Nothing that is embedded."""
    disk = disk_needed(changed("paper"))
    assert disk["finished cells"] == pytest.approx(11 * 4 * 3 * (QWEN + 28.6))
    assert disk["base models"] == pytest.approx(QWEN + 28.6)
    news = disk_needed(changed("single_gpu_muse", models=["olmoe_news"], methods=["original", "unconstrained"]))
    assert news["base models"] == pytest.approx(3 * OLMOE)
    assert news["finished cells"] == pytest.approx(4 * 3 * OLMOE), "the original is none"
    assert disk_needed(changed("tiny")) == {}


def test_states_of_the_jobs_that_run_at_once():
    """Weights, a part of each process with its own copy of all that is not shared, and states in 8 bits of all blocks;
    twice, while one takes the place of another. The largest count; one expert's states are small."""
    gd, seuf = 2 * (2 * 1.5 + 29) + 29 * 2, 61 + 29 / 48 * 2
    project = only(["original", "unconstrained", "seuf"])
    assert disk_needed(project, at_once=1)["training"] == pytest.approx(2 * gd)
    assert disk_needed(project, at_once=9)["training"] == pytest.approx(2 * (gd + seuf))
    corrected = disk_needed(only(["original", "unconstrained", "ptc"]), at_once=9)
    assert corrected["training"] == pytest.approx(2 * gd) and corrected["finished cells"] == pytest.approx(2 * QWEN)
    news = changed("single_gpu_muse", models=["olmoe_news"], methods=["original"])
    news.models["olmoe_news"] = news.models["olmoe_news"].model_copy(update={"optimizer": "adamw"})
    finetuned = disk_needed(news, at_once=9)["training"]
    assert finetuned == pytest.approx(2 * 6.9 * (6 + 4)), "it, and its oracle with states in 8 bits"


def test_every_checkpoint_is_counted():
    """Nine in 10,000 steps, the last of which makes none; of one expert, and of RMU's layers, smaller ones. What
    corrects a finished run makes none."""
    gd, seuf = 2 * (2 * 1.5 + 29) + 29 * 2, 61 + 29 / 48 * 2
    both = only(["original", "unconstrained", "seuf", "ptc"])
    assert checkpoints_written(both) == pytest.approx(9 * (gd + seuf) / 1e3)
    rmu = checkpoints_written(only(["unconstrained"], objectives=["rmu"], seeds=[0, 1]))
    assert rmu == pytest.approx(2 * 9 * (gd - 29 * 2 * 40 / 48) / 1e3)
    often = changed("paper").world.training.model_copy(update={"checkpoint_every": 50})
    assert checkpoints_written(only(["unconstrained"], training=often)) == pytest.approx(199 * gd / 1e3)
    assert checkpoints_written(changed("tiny")) == 0


def test_traces_and_bases_as_recorded_or_at_most(tmp_path):
    """Router inputs in bf16, scores in fp32 and sets in 16 bits, of both sides; every direction of every expert."""
    project = only(["unconstrained", "expert_specific"])
    of_token = 2 * 48 * (2 * 2048 + 4 * 128 + 2 * 8)
    disk = disk_needed(project, tmp_path)
    assert disk["traces"] == pytest.approx(of_token * 64 * 512 / 1e9)
    assert disk["bases"] == pytest.approx(48 * 128 * 2048 * 2048 * 4 / 1e9)
    write_json(tmp_path / LARGE / "wmdp_cyber" / "routing.json", {"retain_tokens": 8000, "forget_tokens": 4000})
    write_json(tmp_path / LARGE / "wmdp_cyber" / "bases" / "expert_specific.json", {"basis_megabytes": 26_000.0})
    known = disk_needed(project, tmp_path)
    assert (known["traces"], known["bases"]) == pytest.approx((of_token * 8000 / 1e9, 26.0))


def test_references_that_do_not_fit_into_memory():
    """Of each seed one, whichever objectives ask for it; KL's own beside it, where that is too large too."""
    states, hidden = (20_000 * 512 * count * 2048 * 2 / 1e9 for count in (49, 1))
    asked = {"methods": ["anchored"], "objectives": ["gd", "kl", "npo"], "seeds": [0, 1]}
    assert disk_needed(changed("paper", models=[LARGE], **asked))["references"] == pytest.approx(2 * (states + hidden))
    larger = changed("paper", models=[LARGE], reference_memory=50, **asked)
    assert disk_needed(larger)["references"] == pytest.approx(2 * states)
    assert "references" not in disk_needed(only(["unconstrained"]))
