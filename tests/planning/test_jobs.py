"""Plans: what is left, by recorded time where there is one; what fits; a budget that refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gripmoe.cli.main import main
from gripmoe.cli.prepare_model import prepare_model
from gripmoe.config.project import Project
from gripmoe.config.provenance import step_seconds
from gripmoe.config.world import NO_OBJECTIVE, RunKey
from gripmoe.io.files import read_json, write_json, write_yaml
from gripmoe.planning import fake
from gripmoe.planning.cost import Costs, Step, steps_of, what_would_fit
from gripmoe.planning.jobs import OUTPUTS, _records, check_budget, disk_needed, jobs_left, that_count

CONFIG = Path(__file__).parents[2] / "workflow" / "config"


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Round numbers in place of a measured step: a layer has 1 GB, in training as much again of gradients and of states
    (of 8 bits, half), shared by processes; passes take 1 GB, or 10 without checkpoints, and 1 TFLOP a layer."""
    asked = []

    def measure(workload):
        asked.append(workload)
        layers, training = workload["layers"], workload.get("training", {})
        run = layers
        if "layer" in training.get("objective", {}):
            run = training["objective"]["layer"] + 1
        weights = 1e9 * layers / workload["processes"]
        gradients = 1e9 * run / workload["processes"] if training else 0
        states = gradients / (2 if training.get("optimizer") == "adamw_8bit" else 1)
        kept, has_basis = weights + gradients + states, bool(workload.get("method", {}).get("basis"))
        return {
            "of_layers": 48, "parameters": 5e8 * layers, "weights": weights, "gradients": gradients, "states": states,
            "passes": kept + 1e9 * (1 if training.get("gradient_checkpointing", True) else 10), "update": kept,
            "saving": weights * 1.5, "basis": 2e9 * layers * has_basis, "held": weights + 5e8 * layers * has_basis,
            "flops": 1e12 * run, "received": 0,
        }  # fmt: skip

    monkeypatch.setattr(fake, "measure", measure)
    monkeypatch.setattr(fake, "layers_of", lambda *_: {"of_layers": 48, "first": 0})
    return asked


def changed(world, **changes):
    project = Project(CONFIG, world)
    project.world = project.world.model_copy(update=changes)
    return project


def test_what_is_there_is_not_planned(tmp_path):
    project = Project(CONFIG, "tiny")
    everything = jobs_left(project, tmp_path)
    key = next(key for key in project.run_keys() if key.method == "unconstrained")
    write_json(tmp_path / key.folder / "checkpoint.json", {})
    left = jobs_left(project, tmp_path)
    assert [job.rule for job in set(everything) - set(left)] == ["unlearn"]
    recorded = {"trace_routing", "fit_basis"}
    assert {job.rule for job in everything} == {
        "prepare_model",
        "unlearn",
        "realign",
        "evaluate",
        "attack",
        "edit_weights",
        *recorded,
    }
    assert sum(job.rule == "attack" for job in everything) == len(project.run_keys())


def record(results, rule, run, seconds, memory=1.0):
    file = results / f"{OUTPUTS[rule].format(*run.split('.'))}.provenance.json"
    write_json(file, {"step": f"gripmoe.cli.{rule}:{rule}", "seconds": seconds, "peak_memory_gib": memory})
    return file


def test_recorded_seconds_come_before_estimates(tmp_path):
    record(tmp_path, "unlearn", "tiny_a.wmdp_tiny.gd.anchored.7", 7200.0)
    record(tmp_path, "evaluate", "tiny_a.wmdp_tiny.gd.anchored.7", 60.0, 2.5)
    jobs = {(job.rule, job.run): job for job in jobs_left(Project(CONFIG, "tiny"), tmp_path)}
    cell = "tiny_a.wmdp_tiny.gd"
    assert (jobs["unlearn", f"{cell}.anchored.0"].hours, jobs["unlearn", f"{cell}.anchored.0"].recorded) == (2.0, True)
    assert jobs["unlearn", f"{cell}.frozen_router.0"].hours == 2.0, "the same model and rule, for want of better"
    assert jobs["evaluate", f"{cell}.anchored.0"].memory == 2.5 * 2**30 / 1e9
    assert jobs["attack", f"{cell}.anchored.0"].memory == 1.0


def test_the_record_of_a_base_model_is_where_its_step_writes_it(tmp_path):
    output = tmp_path / f"{OUTPUTS['prepare_model'].format('tiny_b')}.json"
    settings = {"source": "embedded", "family": "qwen3_moe", "seed": 0, "base": "skills", "shipped": "tiny_a"}
    prepare_model(settings=json.dumps(settings), output=output)
    [seconds] = step_seconds(tmp_path)["prepare_model"]
    assert seconds > 0 and _records(tmp_path, "prepare_model", ("tiny_b",), True)[0]["cpu_seconds"] == seconds


def test_seconds_after_an_interruption_are_not_those_of_a_job(tmp_path):
    """An estimate takes their place, or another run that nothing has interrupted."""

    def hours():
        jobs = jobs_left(Project(CONFIG, "tiny"), tmp_path)
        return next(job.hours for job in jobs if (job.rule, job.run) == ("unlearn", f"{cell}.0"))

    cell = "tiny_a.wmdp_tiny.gd.anchored"
    estimate = hours()
    file = record(tmp_path, "unlearn", f"{cell}.7", 36.0)
    assert hours() == 0.01
    write_json(file, read_json(file) | {"resumed": True})
    assert not step_seconds(file.parent)
    assert hours() == estimate != 0.01
    record(tmp_path, "unlearn", f"{cell}.8", 7200.0)
    assert hours() == 2.0


def test_why_a_model_cannot_be_planned_is_told(tmp_path, monkeypatch, capsys):
    asked = []

    def unknown(*workload):
        asked.append(workload)
        raise fake.NotMeasurable("models.yaml: write its dimensions under `config:`")

    monkeypatch.setattr(fake, "layers_of", unknown)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--world", "paper", "--config", str(CONFIG)]) == 0
    assert "warning: the memory of some steps is unknown: models.yaml: write its" in capsys.readouterr().out
    models = Project(CONFIG, "paper").world.models
    assert len(asked) == len(models), "each model is asked about once"


def test_a_step_costs_what_its_layers_do(tmp_path):
    """Of a card of two processes, of two that share the layers, and of RMU, which trains eight of them."""
    costs = Costs(Project(CONFIG, "paper"), tmp_path)
    step = Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "gd", "unconstrained")
    assert (costs.of(step).total, costs.of(step).tflop, costs.of(step).processes) == (24 + 24 + 12 + 1, 48, 2)
    alone = costs.of(Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "gd", "seuf"))
    assert (alone.gpus, alone.processes, alone.parts["weights"]) == (2, 1, 24)
    single = costs.of(Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "gd", "expert_specific_single"))
    assert single.total == 36 + 24 + 16 + 24, "while it is written, with what the constraint keeps"
    rmu = costs.of(Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "rmu", "unconstrained"))
    assert (rmu.total, rmu.tflop) == (24 + 4 + 2 + 1, 8)
    bases = costs.of(Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "gd", "expert_specific"))
    assert bases.parts["bases"] == 16 and bases.host == 2 * (48 + 8 + 80), "what exceeds basis_memory is on the host"
    seldom = costs.of(Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "gd", "expert_specific_every_10"))
    assert bases.waiting > seldom.waiting > 0 and seldom.parts == bases.parts and seldom.host == bases.host
    cached = costs.of(Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "gd", "expert_specific_paper_cached"))
    assert cached.parts["bases"] == 96 and cached.waiting == 0, "what grows with each step stays where the model is"
    evaluated, attacked = (costs.of(Step("qwen3_30b_a3b", what, "wmdp_cyber")) for what in ("evaluate", "attack"))
    assert (evaluated.total, attacked.total) == (48, 49), "two models, or one that answers"


def test_what_was_measured_is_kept_until_something_changes(tmp_path, measured):
    def total(world="paper", method="unconstrained"):
        step = Step("qwen15_moe", "unlearn", "wmdp_cyber", "gd", method)
        return Costs(changed(world) if isinstance(world, str) else world, tmp_path).of(step)

    first, asked = total(), len(measured)
    assert total() == first and total(method="ptc_matched").total == first.total and len(measured) == asked
    total(method="early_eps_1em4"), total(method="expert_specific")
    asked = len(measured)
    total(method="expert_specific_paper"), total(method="late_eps_1em1"), total(method="expert_specific_eps_1em1")
    assert len(measured) == asked, "whatever the threshold of a null space"
    longer = changed("paper", training=Project(CONFIG, "paper").world.training.model_copy(update={"max_steps": 50}))
    assert total(longer).total == first.total and len(measured) == asked, "a step is a step"
    other = {"gd": {"objective": {"alpha": 1.0}, "optimizer": "adamw"}}
    assert total(changed("paper", objective_training=other)).total > first.total and len(measured) > asked


def test_gpus_that_share_layers_work_one_after_the_other(tmp_path):
    """Hours are those of all GPUs: an evaluation on two takes twice as many."""

    def hours(project):
        return {(job.rule, job.run): job.hours for job in jobs_left(project, tmp_path)}

    cell = "qwen3_30b_a3b.wmdp_cyber.gd"
    one, two = hours(changed("paper", gpus={})), hours(Project(CONFIG, "paper"))
    assert two["evaluate", f"{cell}.anchored.0"] == pytest.approx(2 * one["evaluate", f"{cell}.anchored.0"])
    assert two["unlearn", f"{cell}.seuf.0"] == pytest.approx(2 * one["unlearn", f"{cell}.seuf.0"])
    file = record(tmp_path, "evaluate", f"{cell}.anchored.7", 3600.0)
    recorded = hours(Project(CONFIG, "paper"))
    assert recorded["evaluate", f"{cell}.anchored.0"] == 2.0
    assert recorded["evaluate", f"{cell}.seuf.0"] == 2.0, "to measure it takes as long whatever trained it"
    file.unlink()
    record(tmp_path, "evaluate", f"{cell.replace('wmdp_cyber', 'another')}.anchored.7", 3600.0)
    assert hours(Project(CONFIG, "paper")) == two, "other questions say nothing"


def test_a_faster_card_takes_less_time(tmp_path):
    def trained(tflops):
        jobs = jobs_left(Project(CONFIG, "paper"), tmp_path, tflops)
        return sum(job.hours for job in jobs if job.rule == "unlearn" and ".unconstrained." in job.run)

    assert trained(50.0) == pytest.approx(2 * trained(100.0))


def test_longer_relearning_takes_longer(tmp_path):
    project, hours = Project(CONFIG, "paper"), []
    for steps in ([20], [100]):
        relearning = project.world.relearning.model_copy(update={"steps": steps})
        project.world = project.world.model_copy(update={"relearning": relearning})
        of_attack = [job.hours for job in jobs_left(project, tmp_path) if job.rule == "attack"]
        hours.append(of_attack[0])
    assert hours[1] > hours[0]


def test_what_one_method_took_says_nothing_of_another(tmp_path):
    """Of a model of known dimensions; of the tiny ones it is the best guess."""

    def hours(world):
        return {job.run: job.hours for job in jobs_left(Project(CONFIG, world), tmp_path) if job.rule == "unlearn"}

    before = hours("paper")
    for cell in ("qwen3_30b_a3b.wmdp_cyber.gd", "tiny_a.wmdp_tiny.gd"):
        record(tmp_path, "unlearn", f"{cell}.unconstrained.7", 36000.0)
    after, seeds = hours("paper"), {f"qwen3_30b_a3b.wmdp_cyber.gd.unconstrained.{seed}" for seed in range(10)}
    assert {after[cell] for cell in seeds & after.keys()} == {20.0}
    assert {cell for cell in before if after[cell] != before[cell]} <= seeds
    assert set(hours("tiny").values()) == {10.0}


@pytest.mark.parametrize("world", ["tiny_all", "tiny_muse", "tiny_shared", "tiny_retain", "paper", "single_gpu"])
def test_every_method_may_take_as_many_steps_as_any_other(world):
    project = Project(CONFIG, world)
    limits = {}
    for key in project.run_keys():
        if key.objective != NO_OBJECTIVE and (training := project.training(*key[:4])):
            limits.setdefault((key.objective, key.benchmark), set()).add(training.max_steps)
    assert limits and all(len(of_a_benchmark) == 1 for of_a_benchmark in limits.values())


def test_traces_and_bases_are_planned_once(tmp_path):
    """For all runs of a model on a benchmark, until they are there; and what the machine does without a GPU neither
    counts as GPU-hours nor exhausts a budget of them."""
    project = Project(CONFIG, "paper")
    jobs = jobs_left(project, tmp_path)
    shared = [(job.rule, job.run) for job in jobs if job.rule in ("trace_routing", "fit_basis")]
    traced, fitted = "{}.wmdp_cyber", "{}.wmdp_cyber.expert_specific"
    assert sorted(shared) == sorted(
        (rule, cell.format(model))
        for model in project.world.models
        for rule, cell in (("trace_routing", traced), ("fit_basis", fitted))
    )
    counted = that_count(jobs)
    assert {job.rule for job in jobs if job not in counted} == {"prepare_model", "fit_basis"}
    check_budget(jobs, sum(job.hours for job in counted) + 0.01)
    tiny = jobs_left(Project(CONFIG, "tiny"), tmp_path)
    assert that_count(tiny) == tiny and {"trace_routing", "fit_basis", "edit_weights"} < {job.rule for job in tiny}


@pytest.mark.parametrize("world", ["paper_muse", "single_gpu_muse"])
def test_news_is_planned(tmp_path, world):
    """With a finetuned model and its retrained."""
    jobs = jobs_left(Project(CONFIG, world), tmp_path)
    finetuned = [job for job in jobs if job.rule == "finetune_model"]
    assert finetuned and all(job.hours > 0 and job.gpus and job.memory for job in finetuned)


def test_undo_is_planned_as_training(tmp_path):
    """Of a published model: as many steps as its row says, and what would fit."""
    project = changed("paper", methods=["frozen_router", "undo"], objectives=["npo"], extra_methods={}, overrides={})
    costs = Costs(project, tmp_path)
    [undo] = [step for step in steps_of(project) if step.what == "undo" and step.model == "qwen3_30b_a3b"]
    assert undo.kind == "qwen3_30b_a3b, undo" and costs.of(undo).parts["states"] == 24, "of a GPU of two"
    jobs = {job.run: job for job in jobs_left(project, tmp_path, tflops=1.0, costs=costs) if job.rule == "realign"}
    job = jobs["qwen3_30b_a3b.wmdp_cyber.npo.undo.0"]
    steps = project.methods["undo"].undo.steps
    assert job.hours == pytest.approx(job.gpus * steps * costs.of(undo).seconds(1.0) / 3600)
    assert job.memory == costs.of(undo).total
    saving = [way for way in what_would_fit(costs, undo, costs.of(undo).total - 1, 2000) if "gpus" not in way]
    assert saving and saving[0].startswith("gradient_checkpointing: true")


def test_a_budget_refuses_and_names_the_expensive(tmp_path):
    jobs = jobs_left(Project(CONFIG, "paper"), tmp_path)
    check_budget(jobs, None)
    with pytest.raises(ValueError, match=r"hours exceed the budget of 1\. Most expensive: ") as refused:
        check_budget(jobs, 1.0)
    dearest = max(job.hours for job in jobs)
    first, *others = str(refused.value).partition("Most expensive: ")[2].split("; ")
    assert first in {f"{job.rule} {job.run} {dearest:.2f} h" for job in jobs if job.hours == dearest}
    assert len(others) == 4


@pytest.mark.parametrize(
    "flag, wrong", [("--gpu-memory", "-1"), ("--tflops", "0"), ("--jobs", "0"), ("--budget", "-3")]
)
def test_a_plan_refuses_numbers_that_mean_nothing(flag, wrong, capsys):
    assert main(["plan", "--world", "paper", "--config", str(CONFIG), flag, wrong]) == 2
    assert flag in capsys.readouterr().err


def test_a_plan_refuses_what_does_not_fit_and_says_what_would(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "--world", "paper", "--config", str(CONFIG)]
    assert main([*asked, "--gpu-memory", "1000"]) == 0
    said = capsys.readouterr().out
    assert "qwen3_30b_a3b, gd under expert_specific, 2 GPUs: 24.0 weights + 24.0 gradients" in said
    assert main([*asked, "--gpu-memory", "60"]) == 2
    refused = capsys.readouterr().err
    assert "do not fit GPUs of 60 GB" in refused and "fits with gpus: 4" in refused


def test_changes_are_tried(tmp_path):
    """61 GB under GD: fewer layers, or more GPUs, do for 50; nothing does for 1."""
    costs = Costs(Project(CONFIG, "paper"), tmp_path)
    step = Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "gd", "unconstrained")
    assert not any("gpus: 2" in way for way in what_would_fit(costs, step, 50, 2000))
    assert list(what_would_fit(costs, step, 1, 2000)) == []
    assert step in steps_of(costs.project)


def test_a_checkpoint_of_one_process_has_all_layers(tmp_path):
    """Also where two GPUs share these: 48 GB of weights and 24 of states in 8 bits, and all again beside them. So much
    do two processes save together."""
    for method in ("seuf", "unconstrained"):
        project = changed("paper", models=["qwen3_30b_a3b"], methods=[method], objectives=["gd"], extra_methods={})
        costs = Costs(project, tmp_path)
        cost = costs.of(Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "gd", method))
        assert (cost.gpus, cost.parts["weights"]) == (2, 24)
        assert disk_needed(costs, 1)["training"] == 2 * (48 + 24), method


def test_a_checkpoint_has_averaged_weights_and_growing_bases(tmp_path):
    """48 GB of weights in bf16 train: their average in fp32 has 96. Bases have 96."""
    sizes = {}
    for method, decay in (("unconstrained", 0.0), ("unconstrained", 0.9), ("expert_specific_paper_cached", 0.0)):
        world = Project(CONFIG, "paper").world
        changes = {"training": world.training.model_copy(update={"average_decay": decay}), "overrides": {}}
        names = {"models": ["qwen3_30b_a3b"], "methods": [method], "objectives": ["gd"], "extra_methods": {}}
        costs = Costs(changed("paper", **names, **changes), tmp_path)
        sizes[method, decay] = costs.checkpoint(Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "gd", method))
    plain, averaged, cached = sizes.values()
    assert (averaged - plain, cached - plain) == (96, 2 * 96), "each of two processes saves all bases"


def test_the_command_lists_the_most_expensive_runs_or_all(tmp_path, monkeypatch, capsys):
    """Each run once, with the hours of its steps together."""
    monkeypatch.chdir(tmp_path)

    def rows(*arguments):
        assert main(["plan", "--world", "paper", "--config", str(CONFIG), "--gpu-memory", "1000", *arguments]) == 0
        said = capsys.readouterr().out
        listed = said.split("to run\n")[1].split("\n\n")[0].splitlines()
        return [line.split(maxsplit=4) for line in listed if not line.startswith("and ")], said

    few, said = rows()
    assert len(few) == 5 and "GPU-hours" in said and "disk, with 100 jobs at once" in said
    every, said = rows("--runs")
    jobs = jobs_left(Project(CONFIG, "paper"), tmp_path / "results" / "paper")
    assert {row[0] for row in every} == {job.run for job in jobs} and len(every) == len({job.run for job in jobs})
    assert sum(float(row[1]) for row in every) == pytest.approx(sum(job.hours for job in jobs), abs=1e-3 * len(every))
    assert float(few[0][1]) == max(float(row[1]) for row in every) and "others" not in said


def test_models_that_no_run_needs_are_not_planned(tmp_path):
    """The control lists the retrained model as a method."""
    for methods, models in ((["original"], {"tiny_a"}), (["original", "retrained"], {"tiny_a", "tiny_a_retrained"})):
        jobs = jobs_left(changed("tiny", methods=methods), tmp_path)
        assert {job.run for job in jobs if job.rule == "prepare_model"} == models


def test_a_plan_tells_how_many_runs_are_outdated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    project, key = Project(CONFIG, "tiny"), RunKey("tiny_a", "wmdp_tiny", "gd", "unconstrained", 0)
    settings = project.run(*key).model_dump(mode="json")
    folder = tmp_path / project.results / key.folder
    for step in ("checkpoint", "evaluation", "attack"):
        write_json(folder / f"{step}.json", {})
    for rate, is_outdated in ((5e-4, False), (1e-3, True)):
        settings["training"]["learning_rate"] = rate
        write_yaml(folder / "run.yaml", settings)
        assert main(["plan", "--world", "tiny", "--config", str(CONFIG)]) == 0
        assert ("outdated runs, whose repetition is not in these hours: 1 (" in capsys.readouterr().out) == is_outdated


def test_a_plan_of_the_embedded_world_needs_no_torch(tmp_path):
    """Nor does anything that a Snakefile imports."""
    code = (
        "import sys; from gripmoe.cli.main import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'numpy', 'pandas'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, "plan", "--world", "tiny", "--config", str(CONFIG)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0 and "prepare_model" in result.stdout, result.stderr
