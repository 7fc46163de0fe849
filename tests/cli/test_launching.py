"""The commands that start processes on one node or several; that they meet, test_distributed.py shows."""

import os
import sys

import pytest

from gripmoe.cli import unlearn as commands
from gripmoe.cli.launching import started_together
from gripmoe.cli.main import main
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError

CELL = ["unlearn", "--run", "run.yaml", "--processes", "8"]


def test_one_node_needs_no_meeting_place():
    command = started_together(8, 1, None, CELL, {"SLURM_JOB_ID": "7"})
    assert command[:5] == [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8"]
    assert command[5:] == ["-m", "--", "gripmoe.cli.main", *CELL]


def test_a_slurm_job_starts_the_same_command_once_on_each_node():
    """Which then knows where to meet, and so starts its own processes instead of srun again."""
    job = {"SLURM_JOB_ID": "12345"}
    srun = started_together(8, 2, None, CELL, job)
    assert srun[:5] == ["srun", "--jobid=12345", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    again = srun[srun.index("gripmoe.cli.main") + 1 :]
    assert again[:-2] == CELL and again[-2] == "--rendezvous" and again[-1].endswith(":22345")
    each = started_together(8, 2, again[-1], again, job)
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", f"--rdzv-endpoint={again[-1]}"} < set(each)
    other = started_together(8, 2, again[-1], [*again, "--seed"], job)
    names = [next(part for part in command if "rdzv-id" in part) for command in (each, each, other)]
    assert names[0] == names[1] != names[2], "two runs that meet at one place do not mix"


@pytest.fixture
def paths(tmp_path):
    """Flags of `gripmoe unlearn` whose files are there."""
    there = tmp_path / "there"
    there.touch()
    return [f"--{flag}={there}" for flag in ("run", "model", "trace", "forget-trace", "output")] + [
        f"--data={tmp_path}"
    ]


def test_what_cannot_be_started_is_refused(paths, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["unlearn", *paths, "--processes", "8", "--nodes", "2"]) == 2
    assert "start the same command on each node with --rendezvous" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="8 processes cannot be spread evenly over 3 nodes"):
        started_together(8, 3, "first:29400", CELL, {})


@pytest.mark.parametrize("leftover", ["WORLD_SIZE", None])
def test_processes_start_unless_torchrun_has_started_this_one(leftover, paths, monkeypatch):
    """A batch script may export WORLD_SIZE. The control is a process of torchrun's, which trains."""

    class Ended(Exception):
        """As a process that another one replaces."""

    done = []

    def ends(what):
        done.append(what)
        raise Ended

    monkeypatch.setattr(os, "execvp", lambda program, command: ends(command))
    monkeypatch.setattr(commands, "load_run", lambda file: ends("trains"))
    monkeypatch.setattr(sys, "argv", ["gripmoe", "unlearn", *paths, "--processes", "2"])
    if leftover:
        monkeypatch.setenv(leftover, "1")
    with pytest.raises(Ended):
        main()
    assert "--nproc-per-node=2" in done[0] and done[0][-len(sys.argv) :] == ["gripmoe.cli.main", *sys.argv[1:]]
    done.clear()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with pytest.raises(Ended):
        main()
    assert done == ["trains"]


def test_a_process_alone_joins_no_group_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with distributed.launched():
        assert distributed.processes() == 1
