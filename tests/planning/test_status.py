"""Where runs stand, as `gripmoe status` says it."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml
from tqdm import tqdm

from gripmoe.cli.main import main
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.project import Project
from gripmoe.config.world import RunKey
from gripmoe.io.files import write_json, write_yaml
from gripmoe.planning.status import CLUSTER_LOGS, changes, run_status

CONFIG = Path(__file__).parents[2] / "workflow" / "config"
KEY = ("tiny_a", "wmdp_tiny", "gd")
ATTACK = "gripmoe.cli.attack:attack"
JOB = "host: node1\nBuilding DAG of jobs...\n"
TIME_LIMIT = "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-22T01:02:03 DUE TO TIME LIMIT ***\n"


def log_of(rule, method):
    file = Path("results/tiny/logs", rule, f"{'.'.join(KEY)}.{method}.0.log")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def job_of(rule, method, text, seconds):
    """What a job has left in SLURM's own folder, so many seconds after the step's log was last written to."""
    file = CLUSTER_LOGS.joinpath(f"rule_{rule}", f"{'_'.join(KEY)}_{method}_0", "7.log")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    written = log_of(rule, method).stat().st_mtime + seconds
    os.utime(file, (written, written))


def half_way(file):
    """The log of a step that is at work."""
    with file.open("w") as stream, tqdm(total=600, initial=240, desc="gd/anchored/0", file=stream) as bar:
        bar.set_postfix(forget_accuracy="0.310")


@pytest.fixture
def lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def said():
        assert main(["status", "--world", "tiny", "--config", str(CONFIG)]) == 0
        listed = capsys.readouterr().out.splitlines()
        runs = dict(line.split(maxsplit=1) for line in listed if line.startswith(".".join(KEY)))
        return {key.split(".")[-2]: line for key, line in runs.items() if key.endswith(".0")}, listed[-1]

    return said


def test_slurm_writes_where_status_looks():
    profile = yaml.safe_load((CONFIG.parent / "profiles" / "slurm" / "config.yaml").read_text())
    assert profile["slurm-logdir"] == str(CLUSTER_LOGS)


def test_what_original_answers_take_is_said_by_benchmark(lines, capsys):
    """Of the world's models and benchmarks; nothing where none are kept on disk."""
    for benchmark, size in (("wmdp_tiny", 2_500_000), ("muse_tiny", 1)):
        file = Path("results/tiny/tiny_a", benchmark, "original_answers", "original_states.safetensors")
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(size))
    assert main(["status", "--world", "tiny", "--config", str(CONFIG)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "original_answers" in line]
    assert said == ["results/tiny/tiny_a/wmdp_tiny/original_answers: 0.0025 GB"]


@pytest.mark.parametrize("cluster", [False, True])
def test_a_line_for_a_running_a_failed_a_waiting_and_a_done_run(cluster, lines):
    """The same from the logs of a laptop and from those of a cluster, where SLURM keeps more of them."""
    half_way(log_of("unlearn", "anchored"))
    log_of("realign", "ptc").write_text("Loading weights\nTraceback (most recent call last):\nRuntimeError: singular\n")
    done = Path("results/tiny", *KEY, "unconstrained", "0")
    write_json(done / "checkpoint.json", {"status": "reached", "steps": 120})
    write_json(done / "evaluation.json", {"forget_accuracy": 0.25})
    if cluster:
        job_of("unlearn", "anchored", JOB, seconds=-60)
        job_of("realign", "ptc", JOB + "WorkflowError:\nAt least one job did not complete successfully.\n", seconds=1)
    runs, total = lines()
    assert re.fullmatch(r"unlearn +gd/anchored/0: +40%.* 240/600 \[.*<.*, forget_accuracy=0.310\]", runs["anchored"])
    assert re.fullmatch(r"realign +RuntimeError: singular", runs["ptc"])
    assert re.fullmatch(r"unlearn +waits", runs["frozen_router"])
    assert re.fullmatch(r"attack +waits", runs["unconstrained"])
    assert "done" not in total
    write_json(done / "attack.json", {})
    runs, total = lines()
    assert "unconstrained" not in runs and "1 done" in total


def test_a_run_whose_settings_have_changed_is_outdated(lines):
    done = Path("results/tiny", *KEY, "unconstrained", "0")
    settings = Project(CONFIG, "tiny").run(*KEY, "unconstrained", 0).model_dump(mode="json")
    write_yaml(done / "run.yaml", settings)
    for step in ("checkpoint", "evaluation", "attack"):
        write_json(done / f"{step}.json", {"status": "reached"})
    assert " 1 done" in lines()[1]
    settings["training"]["learning_rate"] *= 2
    write_yaml(done / "run.yaml", settings)
    runs, total = lines()
    assert re.fullmatch(r"outdated +training.learning_rate is 0.0005, was 0.001", runs["unconstrained"])
    assert " 1 outdated" in total and "done" not in total
    code = {"step": "gripmoe.cli.unlearn:unlearn", "code": "of before"}
    write_json(done / "checkpoint.provenance.json", code)
    assert lines()[0]["unconstrained"].endswith("was 0.001; the code of gripmoe.cli.unlearn:unlearn has changed")


def test_a_run_whose_attacks_have_changed_is_outdated(lines):
    """The settings of a step are those of its recorded command. What it was not given does not count."""
    done = Path("results/tiny", *KEY, "unconstrained", "0")
    project = Project(CONFIG, "tiny")
    write_yaml(done / "run.yaml", project.run(*KEY, "unconstrained", 0).model_dump(mode="json"))
    benchmark = project.benchmarks["wmdp_tiny"].model_dump(mode="json", exclude={"few_shot_questions"})
    relearning = project.world.relearning.model_dump(mode="json")

    def attacked(benchmark, relearning):
        given = ["--benchmark", json.dumps(benchmark), "--settings", json.dumps(relearning)]
        step = {"command": shlex.join(["gripmoe", "attack", *given]), "step": ATTACK, "code": code_fingerprint(ATTACK)}
        write_json(done / "attack.provenance.json", step)

    for step in ("checkpoint", "evaluation", "attack"):
        write_json(done / f"{step}.json", {"status": "reached"})
    attacked(benchmark, relearning)
    assert " 1 done" in lines()[1]
    attacked(benchmark | {"evaluation_batch_size": 7}, relearning | {"steps": [5]})
    said = (
        f"evaluation_batch_size is {benchmark['evaluation_batch_size']}, was 7; steps is {relearning['steps']}, was [5]"
    )
    assert lines()[0]["unconstrained"].split(maxsplit=1) == ["outdated", said]
    attacked(benchmark, None)
    assert re.match(r"outdated +.*steps is \[5, 10, 20\], was None", lines()[0]["unconstrained"])


def test_a_run_of_published_data_is_done(tmp_path):
    """How many rows its data has to have is no setting of a step."""
    project = Project(CONFIG, "paper")
    key = RunKey("qwen3_30b_a3b", "wmdp_cyber", "gd", "unconstrained", 0)
    write_yaml(tmp_path / key.folder / "run.yaml", project.run(*key).model_dump(mode="json"))
    given = json.dumps(project.benchmarks["wmdp_cyber"].measured.model_dump(mode="json"))
    command = shlex.join(["gripmoe", "attack", "--benchmark", given, "--settings", json.dumps(None)])
    write_json(tmp_path / key.folder / "attack.provenance.json", {"command": command})
    assert project.benchmarks["wmdp_cyber"].data.rows
    assert [change for change in changes(project, tmp_path, key) if "rows" in change] == []


def test_a_run_that_diverged_has_a_line(lines):
    done = Path("results/tiny", *KEY, "unconstrained", "0")
    for step in ("checkpoint", "evaluation", "attack"):
        write_json(done / f"{step}.json", {"status": "diverged", "steps": 40})
    runs, total = lines()
    assert re.fullmatch(r"diverged +at step 40", runs["unconstrained"]) and " 1 diverged" in total


def test_a_run_that_missed_its_target_has_a_line(lines):
    """The control: one that reached it."""
    done = Path("results/tiny", *KEY, "unconstrained", "0")
    outcome = {"status": "not_reached", "steps": 800, "targets": {"forget_accuracy": 0.27}}
    for step in ("checkpoint", "evaluation", "attack"):
        write_json(done / f"{step}.json", outcome)
    write_json(done / "history.json", [{"step": 0, "forget_accuracy": 1.0}, {"step": 800, "forget_accuracy": 0.3}])
    runs, total = lines()
    said = r"missed +all 800 steps taken: forget_accuracy is 0.300, the target 0.27 \(met at 3 checks in a row\)"
    assert re.fullmatch(said, runs["unconstrained"]) and " 1 missed" in total
    write_json(done / "checkpoint.json", {**outcome, "status": "reached"})
    runs, total = lines()
    assert "unconstrained" not in runs and "1 done" in total


def test_a_run_that_had_nothing_to_unlearn_has_a_line(lines):
    done = Path("results/tiny", *KEY, "unconstrained", "0")
    for step in ("checkpoint", "evaluation", "attack"):
        write_json(done / f"{step}.json", {"status": "reached", "steps": 0})
    runs, total = lines()
    assert runs["unconstrained"].startswith("untrained") and " 1 untrained" in total


def test_a_run_waits_for_the_step_that_has_failed(lines):
    """Of those that it shares with others; one that has begun says what its own log says."""
    waiting = "unlearn   waits"
    assert lines()[0]["unconstrained"].endswith(waiting)
    log = Path("results/tiny/logs/trace_routing/tiny_a.wmdp_tiny.log")
    log.parent.mkdir(parents=True)
    log.write_text("OSError: no space left on device\n")
    failed = "waits for trace_routing of tiny_a.wmdp_tiny: OSError: no space left on device"
    assert lines()[0]["unconstrained"].endswith(f"unlearn   {failed}")
    half_way(log_of("unlearn", "anchored"))
    assert "240/600" in lines()[0]["anchored"]
    write_json(Path("results/tiny/tiny_a/wmdp_tiny/routing.json"), {})
    (log := Path("results/tiny/logs/prepare_data/wmdp_tiny.log")).parent.mkdir()
    log.write_text("ConfigError: too few\n")
    (data := Path("results/tiny/data/wmdp_tiny")).mkdir(parents=True)
    write_json(data / "provenance.json", {})
    assert lines()[0]["unconstrained"].endswith("waits for prepare_data of wmdp_tiny: ConfigError: too few")
    (data / "retain_corpus.jsonl").touch()
    assert lines()[0]["unconstrained"].endswith(waiting)


NOISE = (
    "W1129 17:48:47.512000 7 torch/utils/_pytree.py:630] is already registered\n"
    "[transformers] `use_cache=True` is incompatible with gradient checkpointing\n"
    "/a/b.py:3: UserWarning: the corpus has 2 documents\n  warnings.warn(said)\n"
)


def test_a_warning_is_no_state_unless_there_is_nothing_else(lines):
    log = log_of("unlearn", "anchored")
    for text, said in ((f"at step 3\n{NOISE}", "at step 3"), (NOISE, "warnings.warn(said)")):
        log.write_text(text)
        assert lines()[0]["anchored"].split("unlearn")[1].strip() == said


def test_an_external_checkpoint_is_copied_first(tmp_path):
    (tmp_path / "others.yaml").write_text("extends: tiny\nexternal: {mine: saves/mine}\n")
    project, key = Project(CONFIG, str(tmp_path / "others.yaml")), RunKey(*KEY[:-1], "none", "mine", 0)
    assert run_status(project, tmp_path, key) == ("import_checkpoint", "waits")
    write_json(tmp_path / key.folder / "checkpoint.json", {"status": "external"})
    assert run_status(project, tmp_path, key) == ("evaluate", "waits")


def test_what_slurm_ended_is_not_said_to_run(lines):
    """Until another job goes on with it. A log that ends in a progress bar looks like that of a step at work."""
    half_way(log_of("unlearn", "anchored"))
    job_of("unlearn", "anchored", JOB + TIME_LIMIT + "srun: error: node1: task 0: Killed\n", seconds=1)
    assert lines()[0]["anchored"].endswith("CANCELLED AT 2026-11-22T01:02:03 DUE TO TIME LIMIT ***")
    job_of("unlearn", "anchored", JOB + TIME_LIMIT, seconds=-60)
    assert "240/600" in lines()[0]["anchored"]
