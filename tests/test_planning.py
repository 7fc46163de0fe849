"""Plans: what is left, by recorded time where there is one; what fits; a budget that refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from gripmoe.catalogue import Sizes
from gripmoe.files import write_json
from gripmoe.planning import check_budget, disk_needed, jobs_left, memory_needed
from gripmoe.project import Project

CONFIG = Path(__file__).parents[1] / "workflow" / "config"


def test_what_is_there_is_not_planned(tmp_path):
    project = Project(CONFIG, "tiny")
    everything = jobs_left(project, tmp_path)
    cell = next(cell for cell in project.cells() if cell[3] == "unconstrained")
    write_json(tmp_path.joinpath(*map(str, cell), "checkpoint.json"), {})
    left = jobs_left(project, tmp_path)
    assert [job.rule for job in set(everything) - set(left)] == ["unlearn"]
    assert {job.rule for job in everything} == {"prepare_model", "unlearn", "realign", "evaluate", "attack"}
    assert sum(job.rule == "attack" for job in everything) == len(project.cells())


def test_recorded_seconds_come_before_estimates(tmp_path):
    project = Project(CONFIG, "tiny")
    file = tmp_path / "benchmarks" / "unlearn" / "tiny_a.wmdp_tiny.gd.anchored.7.tsv"
    file.parent.mkdir(parents=True)
    file.write_text("s\th:m:s\n7200.0\t2:00:00\n")
    hours = {job.cell: (job.hours, job.recorded) for job in jobs_left(project, tmp_path) if job.rule == "unlearn"}
    assert hours["tiny_a.wmdp_tiny.gd.anchored.0"] == (2.0, True), "another seed of the same cell"
    assert hours["tiny_a.wmdp_tiny.gd.frozen_router.0"] == (2.0, True), "the same model and rule, for want of better"


def test_each_job_knows_its_memory(tmp_path):
    """Of a published model on each of its GPUs, by the arithmetic below; of an embedded one as recorded."""
    jobs = {(job.rule, job.cell): (job.gpus, job.memory) for job in jobs_left(Project(CONFIG, "paper"), tmp_path)}
    cell = "qwen3_30b_a3b.wmdp_cyber.gd"
    assert jobs["unlearn", f"{cell}.anchored.0"] == (2, pytest.approx(90.0))
    assert jobs["unlearn", f"{cell}.seuf.0"] == (2, pytest.approx(32.0)), "one expert trains, in one process"
    assert jobs["prepare_model", "qwen3_30b_a3b"] == (0, pytest.approx(61.0)), "in the machine"
    assert jobs["realign", f"{cell}.ptc.0"] == (2, pytest.approx(32.0))
    assert jobs["evaluate", f"{cell}.ptc.0"] == (2, pytest.approx(64.0)), "half the layers of both models"
    assert jobs["attack", f"{cell}.ptc.0"] == (2, pytest.approx(96.0)), "relearning"
    single = jobs_left(Project(CONFIG, "single_gpu"), tmp_path)
    attacks = [job.memory for job in single if job.rule == "attack" and job.cell.startswith("olmoe")]
    assert attacks == pytest.approx([6.9 * 6] * len(attacks)) and attacks
    file = tmp_path / "benchmarks" / "evaluate" / "tiny_a.wmdp_tiny.gd.anchored.7.tsv"
    file.parent.mkdir(parents=True)
    file.write_text("s\th:m:s\tmax_rss\n60.0\t0:01:00\t2500.0\n")
    tiny = {job.rule: (job.gpus, job.memory) for job in jobs_left(Project(CONFIG, "tiny"), tmp_path)}
    assert tiny["evaluate"] == (0, 2.5) and tiny["attack"] == (0, 1.0)


def needs_of(project):
    return {(need.model, need.objective): need for need in memory_needed(project)}


def changed(world, **changes):
    project = Project(CONFIG, world)
    project.world = project.world.model_copy(update=changes)
    return project


def test_memory_by_hand_and_rmu_needs_less():
    """29 of 30.5 billion parameters train, of them the experts that are shared; RMU trains 8 of 48 layers."""
    plain = Project(CONFIG, "paper").world.training.model_copy(update={"optimizer": "adamw"})
    full = needs_of(changed("paper", training=plain, gpus={}))["qwen3_30b_a3b", "gd"]
    assert (full.weights, full.gradients, full.states) == pytest.approx((61.0, 58.0, 116.0))
    needs = needs_of(Project(CONFIG, "paper"))
    shared = needs["qwen3_30b_a3b", "gd"]
    assert (shared.weights, shared.gradients, shared.states) == pytest.approx((3.0 + 29.0, 29.0, 29.0))
    assert needs["qwen3_30b_a3b", "rmu"].total == pytest.approx(32 + 29 * 8 / 48 * 2)
    assert needs["qwen3_30b_a3b", "evaluation"].total == pytest.approx(2 * 32.0), "it and the original"
    assert needs["qwen3_30b_a3b", "relearning"].total == pytest.approx(3 * 32.0)
    alone = needs_of(changed("paper", gpus={}))
    assert alone["qwen3_30b_a3b", "evaluation"].total == pytest.approx(122.0)
    assert alone["qwen3_30b_a3b", "relearning"].total == pytest.approx(183.0)
    assert needs_of(Project(CONFIG, "single_gpu"))["olmoe", "relearning"].total == pytest.approx(6.9 * 6)


def test_three_trained_layers_let_rmu_fit_one_gpu():
    """As RMU's authors have it: Qwen3-30B-A3B on one GPU of 80 GB, not only on one of 141."""
    three = Project(CONFIG, "paper").world.training.model_copy(update={"trained_layers": 3, "optimizer": "adamw"})
    needs = needs_of(changed("paper", training=three, gpus={}))
    assert needs["qwen3_30b_a3b", "rmu"].total == pytest.approx(61 + 58 * 3 / 48 * 3) and 61 + 58 / 16 * 3 < 80
    assert needs["qwen3_30b_a3b", "gd"].total == pytest.approx(61 + 58 * 3 / 48 * 3)


def test_small_gpus_hold_the_large_model_if_there_are_enough():
    """Of 48 GB eight do for everything, and two for nothing but RMU."""
    eight, two = (needs_of(changed("paper", gpus={"qwen3_30b_a3b": count})).values() for count in (8, 2))
    assert max(need.total for need in eight if need.gpus == 8) == pytest.approx((1.5 + 29 / 8) * 6)
    assert {need.objective for need in two if need.gpus == 2 and need.total < 48} == {"rmu"}


def test_states_in_fp32_take_more_gpus():
    fp32 = Project(CONFIG, "paper").world.training.model_copy(update={"optimizer": "adamw_fp32"})
    two, eight = (needs_of(changed("paper", training=fp32, gpus={"qwen3_30b_a3b": count})) for count in (2, 8))
    assert two["qwen3_30b_a3b", "rmu"].total == pytest.approx(32 + 29 * 8 / 48 * 7)
    assert two["qwen3_30b_a3b", "gd"].total == pytest.approx(32 + 29 * 7)
    assert eight["qwen3_30b_a3b", "gd"].total == pytest.approx(2 * (1.5 + 29 / 8) + 29 / 4 * 7)


def test_layers_are_not_cut():
    """Of 16 layers the fullest of three GPUs has six."""
    sizes = Sizes(total=10.0, blocks=8.0, active=1.0, layers=16)
    assert sizes.split_over(3) == 2 + 8 * 6 / 16 > sizes.held_by(3)


def test_gpus_that_share_layers_work_one_after_the_other(tmp_path):
    """Hours are those of all GPUs: an evaluation on two takes twice as many, training together does not."""

    def hours(project):
        return {(job.rule, job.cell): job.hours for job in jobs_left(project, tmp_path)}

    cell = "qwen3_30b_a3b.wmdp_cyber.gd"
    one, two = hours(changed("paper", gpus={})), hours(Project(CONFIG, "paper"))
    for rule, method, factor in (("evaluate", "anchored", 2), ("unlearn", "seuf", 2), ("unlearn", "anchored", 1)):
        assert two[rule, f"{cell}.{method}.0"] == factor * one[rule, f"{cell}.{method}.0"]
    file = tmp_path / "benchmarks" / "evaluate" / f"{cell}.anchored.7.tsv"
    file.parent.mkdir(parents=True)
    file.write_text("s\th:m:s\n3600.0\t1:00:00\n")
    assert hours(Project(CONFIG, "paper"))["evaluate", f"{cell}.anchored.0"] == 2.0


def test_disk_by_hand():
    """Eleven methods under four objectives and three seeds, of two models."""
    assert disk_needed(Project(CONFIG, "paper")) == pytest.approx(11 * 4 * 3 * (61.0 + 28.6))
    assert disk_needed(Project(CONFIG, "tiny")) == 0


def test_step_limits_of_the_tiny_world_stay_there():
    assert Project(CONFIG, "tiny").training("gd", "anchored", "wmdp_tiny").max_steps == 600
    paper = Project(CONFIG, "paper")
    assert {paper.training("gd", m, "wmdp_cyber").max_steps for m in ("anchored", "ptc_matched", "unconstrained")} == {
        10000
    }


def test_finetuning_on_news_trains_everything():
    needs = needs_of(Project(CONFIG, "single_gpu_muse"))
    assert needs["olmoe_news", "finetuning"].total == pytest.approx(6.9 * 6)
    assert needs["olmoe_news", "rmu"].total < needs["olmoe_news", "gd"].total < 6.9 * 6
    shared = needs_of(Project(CONFIG, "paper_muse"))["qwen3_30b_a3b_news", "finetuning"]
    assert shared.gpus == 2 and shared.total == pytest.approx((1.5 + 29.0 / 2) * 6)


def test_a_budget_refuses_and_names_the_expensive(tmp_path):
    jobs = jobs_left(Project(CONFIG, "paper"), tmp_path)
    check_budget(jobs, None)
    with pytest.raises(ValueError, match=r"exceed the budget of 1\. Most expensive: unlearn qwen3_30b_a3b"):
        check_budget(jobs, 1.0)


def test_the_command_says_what_does_not_fit(tmp_path):
    command = [sys.executable, "-m", "gripmoe.cli", "plan", "--world", "paper", "--config", str(CONFIG)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0 and "qwen3_30b_a3b, gd, 2 GPUs: 32 GB weights + 29 gradients" in result.stdout
    tight = subprocess.run([*command, "--gpu-memory", "80"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (
        tight.returncode == 2 and "do not hold qwen3_30b_a3b under relearning, qwen3_30b_a3b under gd" in tight.stderr
    )
    assert "they hold qwen3_30b_a3b under evaluation, qwen3_30b_a3b under rmu" in tight.stderr


def test_the_command_lists_the_most_expensive_cells_or_all(tmp_path):
    """Each cell once, with the hours of its steps together."""

    def rows(*arguments):
        command = [sys.executable, "-m", "gripmoe.cli", "plan", "--world", "paper", "--config", str(CONFIG)]
        said = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
        listed = said.split("to run\n")[1].split("\n\n")[0].splitlines()
        return [line.split(maxsplit=4) for line in listed if not line.startswith("and ")], said

    few, said = rows()
    assert [len(few), few[0][2:]] == [5, ["2", "96.0", "unlearn, evaluate, attack"]] and "GPU-hours" in said
    every, said = rows("--cells")
    jobs = jobs_left(Project(CONFIG, "paper"), tmp_path)
    assert {row[0] for row in every} == {job.cell for job in jobs} and len(every) == len({job.cell for job in jobs})
    assert sum(float(row[1]) for row in every) == pytest.approx(sum(job.hours for job in jobs), abs=1e-3 * len(every))
    assert float(few[0][1]) == max(float(row[1]) for row in every) and "others" not in said
