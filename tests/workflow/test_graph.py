"""The workflow before it runs: its graph, its validation, and what it asks of a cluster."""

import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from base64 import urlsafe_b64encode

import pytest
import yaml
from snakemake_executor_plugin_slurm.submit_string import get_submit_command

from edits import edit
from gripmoe.config.project import Project
from gripmoe.config.world import RunKey
from gripmoe.io.files import write_yaml
from snakemake_runs import ROOT, SMOKE, planned, snakemake


@pytest.mark.parametrize(
    ("world", "folder"),
    [("tiny", "tiny"), ("single_gpu", "paper"), ("paper_ablations", "paper"), ("paper_dense", "paper")],
)
def test_each_world_plans_its_own_runs_only(world, folder, tmp_path):
    """In the folder of the world that it extends."""
    output = snakemake("-n", "--config", f"world={world}", directory=tmp_path)
    assert planned(output)["evaluate"] > 10
    assert set(re.findall(r"results/(\w+)/", output)) == {folder}


def test_an_embedded_model_asks_for_the_gpu_that_its_world_gives_it(tmp_path):
    """Its base model too; without, none does."""
    asked = {}
    for world in ("tiny", "tiny_large"):
        output = snakemake("-n", "-p", "--config", f"world={world}", directory=tmp_path)
        resources = re.findall(r"^(?:local)?rule (\w+):.*?resources: (.*?)$", output, re.M | re.S)
        asked[world] = {rule for rule, resource in resources if re.search("gpu=1", resource)}
        gpus = set(re.findall(r"gripmoe prepare-model .* --gpus (\d)", output))
        assert gpus == {"1" if world == "tiny_large" else "0"} and "GRIPMOE_GPUS" not in output
        assert planned(output)["prepare_model"] == (3 if world == "tiny_large" else 2), "shipped models need no skills"
    assert asked == {"tiny": set(), "tiny_large": ON_GPU - {"finetune_model"} | {"prepare_model"}}


def test_slurm_profile_as_typed_from_a_clone(tmp_path):
    """The root link makes `--profile slurm` work; it asks for GPUs and loads the paper's world."""
    result = subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", "slurm", "-n", "--directory", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=False,
    )  # fmt: skip
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-3000:]
    assert "results/paper/" in output and "results/tiny" not in output
    for job in re.split(r"\nrule (?=trace_routing|unlearn|realign|evaluate|attack)", output)[1:]:
        job = job.split("\nrule ")[0]
        gpus = 2 if "model=qwen3_30b_a3b" in job else 1
        assert re.search(rf"resources: .*gpu={gpus}\b", job) and "runtime=" in job
        assert f"GRIPMOE_GPUS={gpus} gripmoe " in job, "so that it does not compute on the CPU of a node"
        processes = int(given[1]) if (given := re.search(r"--processes (\d+)", job)) else 1
        assert int(re.search(r"mem_mb=(\d+)", job)[1]) == 163840 * processes
        if job.startswith("unlearn"):  # where one expert trains, in one process over all GPUs
            assert f"--processes {1 if re.search('method=(seuf|router_l2_single)', job) else gpus}" in job


def test_files_of_local_models_and_data_are_inputs(tmp_path):
    """So an edit in them is noticed, also where a folder ends in a slash. Of a model these are the files of its folder,
    of data also those of folders in it. What plans alone read of a model is no parameter."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "workflow", root / "workflow")
    shutil.copy(ROOT / "Snakefile", root)
    for name in ("src", "notebooks", "envs"):
        (root / name).symlink_to(ROOT / name)
    for file in (
        *("olmoe/config.json", "olmoe/.cache/lock", "olmoe/evals/scores.json"),
        *("corpus/README.md", "corpus/.cache/lock", "corpus/data/train.jsonl"),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    edit(root, "workflow/config/models.yaml:olmoe.id", f"{tmp_path}/olmoe/")
    edit(root, "workflow/config/models.yaml:olmoe.config", {"num_hidden_layers": 16})
    edit(root, "workflow/config/benchmarks.yaml:wmdp_cyber.data.forget_corpus", str(tmp_path / "corpus"))
    targets = [f"results/paper/{name}" for name in ("models/olmoe/model.json", "data/wmdp_cyber/forget_corpus.jsonl")]
    output = snakemake("-n", "-p", *targets, "--config", "world=single_gpu", directory=tmp_path, root=root)
    inputs = {rule: files.split(", ") for rule, files in re.findall(r"^rule (\w+):\n +input: (.*)$", output, re.M)}
    assert inputs == {
        "prepare_model": [str(tmp_path / "olmoe/config.json")],
        "prepare_data": [str(tmp_path / "corpus" / name) for name in ("README.md", "data/train.jsonl")],
    }
    assert "num_hidden_layers" not in output


def record_of(folder, output):
    """Makes up Snakemake's record of a file."""
    record = folder / ".snakemake" / "metadata" / urlsafe_b64encode(str(output).encode()).decode()
    record.parent.mkdir(parents=True, exist_ok=True)
    record.touch()


def in_place_of(target, rule, script, world, folder):
    """What lets `snakemake` run one job alone, by another command: makes up its inputs."""
    job = snakemake("-n", target, "--config", f"world={world}", directory=folder).split(f"rule {rule}:")[1]
    for name in re.search(r"input: (.*)", job)[1].split(", "):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"retain_tokens": 100, "forget_tokens": 100}' if name.endswith(".json") else "")
        record_of(folder, name)  # or a made-up run.yaml would have other settings
    command = folder / "bin" / "gripmoe"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return dict(rules=rule, directory=folder, check=False, path=command.parent)


PROFILE = ROOT / "workflow" / "profiles" / "slurm"
ON_GPU = {"finetune_model", "trace_routing", "unlearn", "realign", "evaluate", "attack"}


def test_facts_of_a_cluster_stand_in_a_copy_of_the_profile_and_gpus_go_to_what_uses_them(tmp_path, monkeypatch):
    """The lines that are commented in the profile, as they are; a GPU model asks for a GPU, so it is no rule's but
    those'."""
    copy = tmp_path / "snakemake" / "mycluster" / "config.yaml"
    copy.parent.mkdir(parents=True)
    text = (PROFILE / "config.yaml").read_text()
    copy.write_text(re.sub(r"(?m)^( *)# ( *[\w-]+:( .*)?)$", r"\1\2", text))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    output = snakemake("-n", "--profile", "mycluster", "--config", "world=paper_muse", directory=tmp_path / "work")
    asked = dict(re.findall(r"^(?:local)?rule (\w+):.*?resources: (.*?)$", output, re.M | re.S))
    assert ON_GPU < asked.keys() and {"prepare_news", "prepare_model", "fit_basis", "collect"} < asked.keys()
    assert {rule for rule, resources in asked.items() if re.search("gpu=[1-9]", resources)} == ON_GPU
    assert {rule for rule, resources in asked.items() if "gpu_model=h200" in resources} == ON_GPU
    assert all("slurm_account=myproject" in resources for resources in asked.values())
    assert {rule for rule, resources in asked.items() if "slurm_partition=gpu" in resources} == ON_GPU
    assert {rule for rule, resources in asked.items() if "slurm_partition=cpu" in resources} == asked.keys() - ON_GPU


@pytest.mark.parametrize("profile", ["slurm", "local"])
def test_a_new_date_of_a_large_corpus_repeats_nothing(tmp_path, profile):
    """Of 10 MB, as Snakemake compares contents up to 1 MB unless it is told."""
    rule = 'rule all:\n    input: "corpus"\n    output: "read"\n    shell: "touch {output}"\n'
    (tmp_path / "Snakefile").write_text(rule)
    (tmp_path / "corpus").write_bytes(bytes(10_000_000))
    command = ["--profile", PROFILE.with_name(profile), "--executor", "local", "--cores", 1]
    snakemake(*command, directory=tmp_path, root=tmp_path)
    (tmp_path / "corpus").touch()
    assert "Nothing to be done" in snakemake("-n", *command, directory=tmp_path, root=tmp_path)


def test_memory_and_time_grow_with_every_attempt_that_the_profile_allows(tmp_path, monkeypatch):
    """A trainer that always fails, of a model that two processes share."""
    target = "results/paper/qwen3_30b_a3b/wmdp_cyber/gd/unconstrained/0/checkpoint.json"
    only = in_place_of(target, "unlearn", "exit 1", "paper", tmp_path)
    output = snakemake(target, "--profile", "slurm", "--executor", "local", "--cores", 2, **only)
    attempts = 1 + yaml.safe_load((PROFILE / "config.yaml").read_text())["retries"]
    asked = re.findall(r"resources: .*?mem_mb=(\d+).*runtime=(\d+)", output)
    first = int(asked[0][0])
    assert asked == [(str(first * n), str(720 * n)) for n in range(1, attempts + 1)] and attempts > 1
    assert first >= 2 * 65536


def test_order_of_the_steps(tmp_path):
    """Representation extraction, basis caching, unlearning, PTC, evaluation, attacks, notebooks: each waits for the one
    before."""
    dot = snakemake("--rulegraph", "--config", f"world={SMOKE}", directory=tmp_path)
    names = dict(re.findall(r'(\d+)\[label = "(\w+)"', dot))
    edges = {(names[a], names[b]) for a, b in re.findall(r"(\d+) -> (\d+)", dot)}

    def before(rule):
        reached, pending = set(), [rule]
        while pending:
            current = pending.pop()
            for a, b in edges:
                if b == current and a not in reached:
                    reached.add(a)
                    pending.append(a)
        return reached

    order = ["trace_routing", "fit_basis", "unlearn", "realign", "evaluate", "attack", "collect", "render_main_results"]
    for earlier, later in zip(order, order[1:], strict=False):
        assert earlier in before(later), f"{later} does not wait for {earlier}"
        assert later not in before(earlier)


def test_mistakes_end_before_any_job(tmp_path):
    (tmp_path / "broken.yaml").write_text(SMOKE.read_text() + "metods: []\n")
    output = snakemake("--cores", 1, "--config", f"world={tmp_path / 'broken.yaml'}", directory=tmp_path, check=False)
    assert "broken.yaml: metods: unknown key; valid keys: models" in output
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("budget", ["abc", "-3"])
def test_a_budget_that_is_no_number_of_hours_is_refused_before_anything_else(budget, tmp_path):
    refused = snakemake("-n", "--config", f"world={SMOKE}", f"budget={budget}", directory=tmp_path, check=False)
    assert f"--config budget={budget}: give a number of hours above 0" in refused


def test_tables_of_the_runs_that_have_ended(tmp_path):
    """One has, another is evaluated, of the others nothing is there. All are waited for unless the user says so."""
    run = tmp_path / "results" / "smoke" / "smoke" / "wmdp_smoke" / "gd" / "unconstrained" / "0"
    world = f"world={SMOKE}"
    refused = snakemake("-n", "--config", world, "partial=1", directory=tmp_path, check=False)
    assert "--config partial: no run of smoke has ended" in refused
    for folder in (run, run.parent.with_name("ptc") / "0"):
        configured(tmp_path, folder.parent.name)
        for name in ("evaluation.json", "questions.csv", "attack.json", "attack_questions.csv"):
            if "attack" not in name or folder == run:
                (folder / name).touch()
    waited = [snakemake("-n", "--config", world, *partial, directory=tmp_path) for partial in ((), ("partial=1",))]
    runs = [re.search(r"^rule collect:\n +input: (.*)", output, re.M)[1].count("attack.json") for output in waited]
    assert runs == [6, 1]


def test_the_page_of_ended_runs_asks_for_no_other_data(tmp_path):
    """The control waits for all runs, so it has the data of both benchmarks."""
    world = yaml.safe_load(SMOKE.read_text()) | {"benchmarks": ["wmdp_smoke", "wmdp_tiny"]}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(world))
    run = tmp_path / "results" / "two" / "smoke" / "wmdp_smoke" / "none" / "original" / "0"
    run.mkdir(parents=True)
    for name in ("evaluation.json", "questions.csv", "attack.json", "attack_questions.csv"):
        (run / name).touch()
    given = f"world={tmp_path / 'two.yaml'}"
    for partial, benchmarks in (((), {"wmdp_smoke", "wmdp_tiny"}), (("partial=1",), {"wmdp_smoke"})):
        output = snakemake("-n", "--config", given, *partial, directory=tmp_path)
        asked = re.search(r"^rule explore:\n +input: (.*)", output, re.M)[1]
        assert {benchmark for benchmark in ("wmdp_smoke", "wmdp_tiny") if f"data/{benchmark}/" in asked} == benchmarks


def configured(folder, method, **change):
    """The run.yaml of a run of the smoke world, with some other settings."""
    key = RunKey("smoke", "wmdp_smoke", "gd", method, 0)
    run = Project(ROOT / "workflow" / "config", str(SMOKE)).run(*key).model_dump(mode="json")
    run["training"] = run["training"] and run["training"] | change
    write_yaml(folder / "results" / "smoke" / key.folder / "run.yaml", run)


def test_without_its_records_snakemake_does_not_take_a_run_of_other_settings(tmp_path):
    world = f"world={SMOKE}"
    configured(tmp_path, "unconstrained")
    assert planned(snakemake("-n", "--config", world, directory=tmp_path))["configure"] == 5, "one is there"
    configured(tmp_path, "unconstrained", learning_rate=1.0)
    refused = snakemake("-n", "--config", world, directory=tmp_path, check=False)
    assert "unconstrained/0/run.yaml: this run has other settings than" in refused
    file = "results/smoke/smoke/wmdp_smoke/gd/unconstrained/0/run.yaml"
    record_of(tmp_path, file.replace("unconstrained", "frozen_router"))
    again = snakemake("-n", "--config", world, directory=tmp_path, check=False)
    assert "other settings than" in again, "the record is that of another run"
    record_of(tmp_path, file)
    assert "other settings than" not in snakemake("-n", "--config", world, directory=tmp_path, check=False)


def test_a_setting_without_the_world_is_refused(tmp_path):
    """`--config` replaces the world that the profile of the cluster names, and `tiny` would take its place."""
    asked = ("-n", "--profile", ROOT / "workflow" / "profiles" / "slurm", "--config", "budget=500")
    assert "--config budget: name the world too" in snakemake(*asked, directory=tmp_path, check=False)


def test_a_budget_refuses_before_any_job(tmp_path):
    output = snakemake("--cores", 1, "--config", f"world={SMOKE}", "budget=0.1", directory=tmp_path, check=False)
    assert "hours exceed the budget of 0.1. Most expensive: prepare_model smoke 0.13 h" in output
    assert not list(tmp_path.rglob("*.jsonl"))


def test_jobs_of_another_snakemake_are_left_to_it(tmp_path):
    """Of this folder only, and only while they are in the queue."""
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\necho '7|PENDING|{tmp_path}|rule_unlearn'; echo '8|PENDING|/other|rule_unlearn'\n")
    squeue.chmod(0o755)
    start = "--cores", 1, "--config", f"world={SMOKE}"
    output = snakemake(*start, directory=tmp_path, check=False, path=squeue.parent)
    assert "7 (PENDING): rule_unlearn\nIf it still runs, they are its own" in output and "8 (PENDING)" not in output


def test_the_plan_is_a_target(tmp_path):
    output = snakemake("plan", "--cores", 1, "--config", f"world={SMOKE}", directory=tmp_path)
    assert "hours each" in output and "prepare_model" in output


class Resources(dict):
    """Of a job, as a plugin reads them."""

    __getattr__ = dict.__getitem__


def submitted(output, rule, wildcards):
    """A job of a dry run, its resources, and how it is submitted to SLURM."""
    jobs = (job.split("\nrule ")[0] for job in output.split(f"\nrule {rule}:")[1:])
    job = next(job for job in jobs if f"wildcards: {wildcards}\n" in job)
    asked = dict(re.findall(r"(\w+)=([^,\n]*)", re.search(r"resources: (.*)", job)[1]))
    resources = Resources({name: int(value) if value.isdigit() else value for name, value in asked.items()})
    threads = re.search(r"threads: (\d+)", job)
    asking = Namespace(resources=resources, threads=int(threads[1]) if threads else 1)
    names = ("run_uuid", "slurm_logfile", "comment_str", "account", "partition", "workdir")
    command = get_submit_command(asking, dict.fromkeys(names, ""))
    return job, resources, command


SHORT = "extends: paper\nmodels: [qwen3_30b_a3b]\nobjectives: [gd]\nseeds: [0]\nartefacts: [main_results]\n"


def test_the_gpus_of_one_process_are_those_of_one_node(tmp_path):
    """SLURM would take two from two nodes, of which the process sees one."""
    world = tmp_path / "short.yaml"
    world.write_text(f"{SHORT}methods: [original, unconstrained, seuf, ptc]\n")
    output = snakemake("-n", "--cores", 20, "--config", f"world={world}", directory=tmp_path)
    pair = "model=qwen3_30b_a3b, benchmark=wmdp_cyber"
    jobs = [("trace_routing", pair)]
    jobs += [(rule, f"{pair}, objective=gd, method=ptc, seed=0") for rule in ("realign", "evaluate", "attack")]
    jobs += [("unlearn", f"{pair}, objective=gd, method=seuf, seed=0")]
    for rule, wildcards in jobs:
        _, resources, command = submitted(output, rule, wildcards)
        assert resources.gpu == 2 and {"--nodes=1", "--cpus-per-task=8"} <= {*command.split()}, rule


def test_bases_of_a_published_model_are_fitted_on_many_cores(tmp_path):
    """The command gets as many threads as SLURM gives it, and six hours; those of a tiny model take one, and an hour at
    most."""
    world = tmp_path / "short.yaml"
    world.write_text(f"{SHORT}methods: [unconstrained, expert_specific]\n")
    fitted = []
    for name, model in ((world, "paper/qwen3_30b_a3b/wmdp_cyber"), ("tiny", "tiny/tiny_a/wmdp_tiny")):
        target = f"results/{model}/bases/expert_specific.json"
        only = in_place_of(target, "fit_basis", "echo $OMP_NUM_THREADS > threads; exit 1", name, tmp_path)
        output = snakemake(target, "--cores", 20, "--config", f"world={name}", **only)
        fitted.append((int((tmp_path / "threads").read_text()), int(re.search(r"runtime=(\d+)", output)[1])))
    assert fitted == [(16, 360), (1, 60)]
    planned_jobs = snakemake("-n", "--cores", 20, "--config", f"world={world}", directory=tmp_path)
    wildcards = "model=qwen3_30b_a3b, benchmark=wmdp_cyber, method=expert_specific"
    _, resources, command = submitted(planned_jobs, "fit_basis", wildcards)
    assert "--cpus-per-task=16" in command.split() and not resources.get("gpu")


@pytest.mark.parametrize("given, told", [("wrld=tiny", "unknown key 'wrld'"), ("world=", "give the name of a world")])
def test_a_wrong_config_key_is_refused(given, told, tmp_path):
    assert told in snakemake("-n", "--config", given, directory=tmp_path, check=False)
