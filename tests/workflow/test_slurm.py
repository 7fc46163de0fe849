"""The workflow on a real SLURM (one node on loopback, two made-up GPUs), while everything in it dies once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from conftest import HANGS

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "slurm"
WORLD = SCRIPTS / "world.yaml"
METHODS = ("unconstrained", "expert_specific")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
ON_SLURM = [
    "--profile", "slurm", "--default-resources", "slurm_account=research", "slurm_partition=gpu", "mem_mb=2000",
    "runtime=10", "--set-resources", "unlearn:gpu=1", "--latency-wait", "10",
    "--slurm-init-seconds-before-status-checks", "3", "--seconds-between-status-checks", "3",
]  # fmt: skip
# The plugin waits ten seconds longer after every look at which no job has ended.
PROGRAM = """
from snakemake.cli import main
from snakemake_executor_plugin_slurm import Executor
Executor.next_seconds_between_status_checks = property(lambda self: 3, lambda self, seconds: None)
main()
"""
HEADS: list[subprocess.Popen] = []
pytestmark = pytest.mark.workflow


@pytest.fixture(scope="module")
def slurm():
    """The environment of a running cluster; skips, and so is reported as not run, where none can be installed."""
    if os.environ.get("GRIPMOE_TEST_SLURM") != "1" or os.geteuid() != 0:
        pytest.skip("not run: as root, with GRIPMOE_TEST_SLURM=1, this installs SLURM and starts a cluster on loopback")
    installed = subprocess.run([SCRIPTS / "install.sh"], capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"not run: no SLURM packages: {installed.stderr.strip()[-200:]}")
    folder = Path(tempfile.mkdtemp(prefix="gripmoe-slurm-"))  # where the database's user gets in
    folder.chmod(0o755)
    try:
        started = subprocess.run(
            [SCRIPTS / "start.sh", folder], capture_output=True, text=True, check=False, timeout=180
        )
        logs = "".join(file.read_text(errors="replace")[-1500:] for file in (folder / "log").glob("*.log"))
        assert started.returncode == 0 and "idle" in started.stdout, started.stdout + started.stderr + logs
        yield {**ENVIRONMENT, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([SCRIPTS / "stop.sh", folder], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def plain(slurm, tmp_path_factory):
    """A folder in which the runs were trained on no cluster, without an interruption."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    wanted = [str(cell(Path(), name) / "checkpoint.json") for name in METHODS]
    code, log = ended(head(folder, ENVIRONMENT, *wanted, "--cores", "2", server=True), folder)
    assert code == 0, log
    return folder


@pytest.fixture(autouse=True)
def nothing_left(slurm):
    """After each test, so that one that fails takes no other with it: no head, and no job in the queue."""
    yield
    for process in HEADS:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    HEADS.clear()
    subprocess.run(["scancel", "--user", "root"], env=slurm, check=False)
    until(lambda: not queue(slurm), "an empty queue")


def cell(folder, method):
    return folder / "results" / WORLD.stem / "smoke" / "wmdp_smoke" / "gd" / method / "0"


def head(folder, environment, *arguments, server=False):
    """A head process of the workflow in `folder`, in a session of its own; jobs import faster on a fork server."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "gripmoe.cli.fork_server"] if server else []
    command += [sys.executable, "-c", PROGRAM, "-s", ROOT / "Snakefile", "--directory", folder]
    log = open(folder / "head.log", "a")
    process = subprocess.Popen(
        [*map(str, command), *arguments, "--config", f"world={WORLD}"],
        cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    HEADS.append(process)
    return process


def ended(process, folder, seconds=HANGS):
    return process.wait(seconds), (folder / "head.log").read_text()[-6000:]


def queue(environment):
    """Jobs that run: (id, state, comment)."""
    listing = subprocess.run(
        ["squeue", "-h", "-o", "%i|%T|%k"], capture_output=True, text=True, env=environment, check=True
    ).stdout
    return [tuple(line.split("|")) for line in listing.splitlines()]


def until(condition, what, seconds=HANGS):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.5)
    raise AssertionError(f"waited in vain for {what}")


def trainers(folder):
    """Process ids of trainers at work in `folder`."""
    there = str(folder.resolve())
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "cwd"])  # leaves out those that end meanwhile
        if process.info["cwd"] == there and "bin/gripmoe unlearn" in " ".join(process.info["cmdline"] or [])
    ]


def accounts(environment):
    """Every job that has been: (comment, state)."""
    listing = subprocess.run(
        ["sacct", "-X", "-n", "-P", "-o", "Comment,State"], capture_output=True, text=True, env=environment, check=True
    ).stdout
    return [tuple(line.rsplit("|", 1)) for line in listing.splitlines()]


def assert_same(one, other):
    """Two runs ended at the same step with the same weights."""
    ended = [json.loads((folder / "checkpoint.json").read_text()) for folder in (one, other)]
    assert (ended[0]["weights"], ended[0]["steps"]) == (ended[1]["weights"], ended[1]["steps"])


def test_everything_dies_once_and_nothing_is_lost(slurm, plain, tmp_path):
    """A run is preempted and requeued, another trainer is killed, then the head. The next head refuses to start beside
    the jobs that are left; once they are gone it ends, with the weights of an uninterrupted run on no cluster."""
    folder = shutil.copytree(plain, tmp_path / "slurm")
    shutil.rmtree(folder / "results" / WORLD.stem / "smoke")  # leaves the data and the base model
    wanted = [str(cell(Path(), name) / "checkpoint.json") for name in METHODS]
    first = head(folder, slurm, *wanted, *ON_SLURM)
    cells = [cell(folder, name) for name in METHODS]
    until(lambda: any((each / "state.pt").exists() for each in cells), "a checkpoint")

    running = [job for job, state, comment in queue(slurm) if state == "RUNNING" and "unlearn" in comment]
    described = subprocess.run(
        ["scontrol", "show", "job", running[0]], capture_output=True, text=True, env=slurm, check=True
    ).stdout
    assert "gres/gpu=1" in described and "Partition=gpu" in described
    subprocess.run(
        ["sbatch", "-A", "research", "-p", "high", "--exclusive", "--mem=100", "-o", "/dev/null", "--wrap", "sleep 3"],
        env=slurm, check=True, capture_output=True,
    )  # fmt: skip

    def requeued():
        shown = (
            subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, env=slurm, check=False)
            for job in running
        )
        return any("Restarts=1" in result.stdout for result in shown)

    until(requeued, "the requeue")
    killed = until(lambda: trainers(folder), "a trainer after the preemption")[0]
    time.sleep(3)
    with suppress(ProcessLookupError):
        os.kill(killed, signal.SIGKILL)  # of the profile's retries one takes over
    until(lambda: [pid for pid in trainers(folder) if pid != killed], "another trainer")

    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    left = [job for job, _, comment in queue(slurm) if comment.startswith("rule_")]
    assert left, "the jobs outlive their head"
    unlocked = head(folder, slurm, "--profile", "slurm", "--unlock")
    assert ended(unlocked, folder)[0] == 0
    code, log = ended(head(folder, slurm, *wanted, *ON_SLURM), folder)
    assert code != 0 and "still in the queue" in log and left[0] in log

    subprocess.run(["scancel", *left], env=slurm, check=True)
    until(lambda: not queue(slurm), "an empty queue")
    ended(head(folder, slurm, "--profile", "slurm", "--unlock"), folder)
    code, log = ended(head(folder, slurm, *wanted, *ON_SLURM), folder)
    assert code == 0, log

    for name in METHODS:
        assert_same(cell(folder, name), cell(plain, name))
    completed = {comment.split("_wildcards")[0] for comment, state in accounts(slurm) if state == "COMPLETED"}
    assert {"rule_trace_routing", "rule_fit_basis", "rule_unlearn"} <= completed
    assert list((folder / "logs" / "slurm").rglob("*.log")), "what jobs print is kept"


def test_what_runs_out_of_memory_and_of_time_gets_more_and_resumes(slurm, plain, tmp_path):
    """A training run gets too little memory at first, then a minute, in which it is stopped, then enough of both."""
    folder = shutil.copytree(plain, tmp_path / "slurm")
    wanted = cell(Path(), METHODS[0]) / "checkpoint.json"
    shutil.rmtree((folder / wanted).parent)
    limits = ["--set-resources", "unlearn:gpu=1", "unlearn:mem_mb=400*attempt", "unlearn:runtime=max(1,30*(attempt-2))"]
    clustered = head(folder, slurm, str(wanted), *ON_SLURM, *limits)
    until(lambda: (folder / wanted).with_name("state.pt").exists(), "a checkpoint")
    os.kill(trainers(folder)[0], signal.SIGSTOP)  # no machine is so fast that it ends within SLURM's shortest limit
    code, log = ended(clustered, folder)
    assert code == 0, log
    assert_same((folder / wanted).parent, (plain / wanted).parent)
    states = [state for comment, state in accounts(slurm) if comment.startswith("rule_unlearn")]
    assert states[-3:] == ["FAILED", "TIMEOUT", "COMPLETED"], states  # without cgroups memory is a failure like others
    log = (folder / "results" / WORLD.stem / "logs/unlearn/smoke.wmdp_smoke.gd.unconstrained.0.log").read_text()
    assert int(log.split("resumes at step ")[1].split()[0]) >= 100, "the last one did not begin again"
    jobs = sorted((folder / "logs" / "slurm").rglob("rule_unlearn/**/*.log"), key=lambda log: int(log.stem))
    assert "exceeded memory limit" in jobs[0].read_text() and "DUE TO TIME LIMIT" in jobs[1].read_text()
