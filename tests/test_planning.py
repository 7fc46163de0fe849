"""Plans: what is left, by recorded time where there is one; what fits; a budget that refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from gripmoe.files import write_json
from gripmoe.planning import check_budget, jobs_left, that_count
from gripmoe.project import NO_OBJECTIVE, Project

CONFIG = Path(__file__).parents[1] / "workflow" / "config"


def test_what_is_there_is_not_planned(tmp_path):
    project = Project(CONFIG, "tiny")
    everything = jobs_left(project, tmp_path)
    cell = next(cell for cell in project.cells() if cell[3] == "unconstrained")
    write_json(tmp_path.joinpath(*map(str, cell), "checkpoint.json"), {})
    left = jobs_left(project, tmp_path)
    assert [job.rule for job in set(everything) - set(left)] == ["unlearn"]
    recorded = {"trace_routing", "fit_basis"}
    assert {job.rule for job in everything} == {"prepare_model", "unlearn", "realign", "evaluate", "attack", *recorded}
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
    assert jobs["unlearn", f"{cell}.anchored.0"] == (2, pytest.approx(90.0, abs=0.2))
    alone = 32 + 29 / 48 * 2 + 29 * 2 / 3  # with a gradient, to be written
    assert jobs["unlearn", f"{cell}.seuf.0"] == (2, pytest.approx(alone, abs=0.2)), "in one process"
    assert jobs["prepare_model", "qwen3_30b_a3b"] == (0, pytest.approx(61 + 58 * 2 / 3)), "in the machine"
    assert jobs["realign", f"{cell}.ptc.0"] == (2, pytest.approx(32 + 29 * 2 / 3))
    gpus, memory = jobs["fit_basis", "qwen3_30b_a3b.wmdp_cyber.expert_specific"]
    assert gpus == 0 and memory > 103, "all bases, in the machine"
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


def changed(world, **changes):
    project = Project(CONFIG, world)
    project.world = project.world.model_copy(update=changes)
    return project


def test_gpus_that_share_layers_work_one_after_the_other(tmp_path):
    """Hours are those of all GPUs: an evaluation on two takes twice as many, and so does training in one process."""

    def hours(project):
        return {(job.rule, job.cell): job.hours for job in jobs_left(project, tmp_path)}

    cell = "qwen3_30b_a3b.wmdp_cyber.gd"
    one, two = hours(changed("paper", gpus={})), hours(Project(CONFIG, "paper"))
    for rule, method in (("evaluate", "anchored"), ("unlearn", "seuf")):
        assert two[rule, f"{cell}.{method}.0"] == 2 * one[rule, f"{cell}.{method}.0"]
    file = tmp_path / "benchmarks" / "evaluate" / f"{cell}.anchored.7.tsv"
    file.parent.mkdir(parents=True)
    file.write_text("s\th:m:s\n3600.0\t1:00:00\n")
    recorded = hours(Project(CONFIG, "paper"))
    assert recorded["evaluate", f"{cell}.anchored.0"] == 2.0
    assert recorded["evaluate", f"{cell}.seuf.0"] == 2.0, "to measure it takes as long whatever trained it"
    file.rename(tmp_path / "benchmarks" / "evaluate" / f"{cell.replace('wmdp_cyber', 'another')}.anchored.7.tsv")
    assert hours(Project(CONFIG, "paper")) == two, "other questions say nothing"


def test_a_trace_of_one_benchmark_says_nothing_of_another(tmp_path):
    def hours():
        return {
            job.cell: job.hours for job in jobs_left(Project(CONFIG, "paper"), tmp_path) if job.rule == "trace_routing"
        }

    before, folder = hours(), tmp_path / "benchmarks" / "trace_routing"
    folder.mkdir(parents=True)
    (folder / "qwen15_moe.another.tsv").write_text("s\th:m:s\n36000.0\t10:00:00\n")
    assert hours() == before
    (folder / "qwen15_moe.wmdp_cyber.tsv").write_text("s\th:m:s\n36000.0\t10:00:00\n")
    assert hours() == {**before, "qwen15_moe.wmdp_cyber": 10.0}


def test_what_one_method_took_says_nothing_of_another(tmp_path):
    """Of a model of known size; of the tiny ones it is the best guess."""

    def hours(world):
        return {job.cell: job.hours for job in jobs_left(Project(CONFIG, world), tmp_path) if job.rule == "unlearn"}

    before = hours("paper")
    for cell in ("qwen3_30b_a3b.wmdp_cyber.gd", "tiny_a.wmdp_tiny.gd"):
        file = tmp_path / "benchmarks" / "unlearn" / f"{cell}.unconstrained.7.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("s\th:m:s\n36000.0\t10:00:00\n")
    after, seeds = hours("paper"), {f"qwen3_30b_a3b.wmdp_cyber.gd.unconstrained.{seed}" for seed in range(10)}
    assert {after[cell] for cell in seeds & after.keys()} == {20.0}
    assert {cell for cell in before if after[cell] != before[cell]} <= seeds
    assert set(hours("tiny").values()) == {10.0}


@pytest.mark.parametrize("world", ["tiny_all", "tiny_muse", "tiny_shared", "tiny_retain", "paper", "single_gpu"])
def test_every_method_may_take_as_many_steps_as_any_other(world):
    project = Project(CONFIG, world)
    limits = {}
    for cell in project.cells():
        _, benchmark, objective, method, _ = cell
        if objective != NO_OBJECTIVE and (training := project.training(objective, method, benchmark)):
            limits.setdefault((objective, benchmark), set()).add(training.max_steps)
    assert limits and all(len(of_a_benchmark) == 1 for of_a_benchmark in limits.values())


def test_traces_and_bases_are_planned_once(tmp_path):
    """For all cells of a model on a benchmark, until they are there; and what the machine does without a GPU neither
    counts as GPU-hours nor exhausts a budget of them."""
    project = Project(CONFIG, "paper")
    jobs = jobs_left(project, tmp_path)
    shared = [(job.rule, job.cell) for job in jobs if job.rule in ("trace_routing", "fit_basis")]
    traced, fitted = "{}.wmdp_cyber", "{}.wmdp_cyber.expert_specific"
    assert sorted(shared) == sorted(
        (rule, cell.format(model))
        for model in project.world.models
        for rule, cell in (("trace_routing", traced), ("fit_basis", fitted))
    )
    for name in ("routing.json", "bases/expert_specific.json"):
        write_json(
            tmp_path / "qwen15_moe" / "wmdp_cyber" / name,
            {"retain_tokens": 1, "forget_tokens": 1, "basis_megabytes": 1.0},
        )
    left = {job.cell for job in jobs_left(project, tmp_path) if job.rule in ("trace_routing", "fit_basis")}
    assert left == {traced.format("qwen3_30b_a3b"), fitted.format("qwen3_30b_a3b")}
    counted = that_count(jobs)
    assert {job.rule for job in jobs if job not in counted} == {"prepare_model", "fit_basis"}
    check_budget(jobs, sum(job.hours for job in counted) + 0.01)
    tiny = jobs_left(Project(CONFIG, "tiny"), tmp_path)
    assert that_count(tiny) == tiny and {"trace_routing", "fit_basis"} < {job.rule for job in tiny}


def test_a_budget_refuses_and_names_the_expensive(tmp_path):
    jobs = jobs_left(Project(CONFIG, "paper"), tmp_path)
    check_budget(jobs, None)
    with pytest.raises(ValueError, match=r"exceed the budget of 1\. Most expensive: unlearn qwen3_30b_a3b"):
        check_budget(jobs, 1.0)


def test_the_command_lists_the_most_expensive_cells_or_all(tmp_path):
    """Each cell once, with the hours of its steps together."""

    def rows(*arguments):
        command = [sys.executable, "-m", "gripmoe.cli", "plan", "--world", "paper", "--config", str(CONFIG)]
        said = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path).stdout
        listed = said.split("to run\n")[1].split("\n\n")[0].splitlines()
        return [line.split(maxsplit=4) for line in listed if not line.startswith("and ")], said

    few, said = rows()
    assert [len(few), few[0][2:]] == [5, ["2", "122.0", "unlearn, evaluate, attack"]] and "GPU-hours" in said
    assert "checkpoints, at most: " in said and " TB written in all, at 1 GB/s " in said
    every, said = rows("--cells")
    jobs = jobs_left(Project(CONFIG, "paper"), tmp_path)
    assert {row[0] for row in every} == {job.cell for job in jobs} and len(every) == len({job.cell for job in jobs})
    assert sum(float(row[1]) for row in every) == pytest.approx(sum(job.hours for job in jobs), abs=1e-3 * len(every))
    assert float(few[0][1]) == max(float(row[1]) for row in every) and "others" not in said
