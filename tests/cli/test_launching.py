"""A command that trains starts its processes itself; that they work together, test_distributed.py shows."""

import os
import sys
from pathlib import Path

import pytest

from gripmoe.cli import unlearn as commands
from gripmoe.cli.main import main
from gripmoe.config.project import Project
from gripmoe.io import distributed

PROJECT = Project(Path(__file__).parents[2] / "workflow" / "config", "tiny")


@pytest.mark.parametrize("leftover", ["WORLD_SIZE", None])
def test_processes_start_unless_torchrun_has_started_this_one(leftover, tmp_path, monkeypatch):
    """A batch script may export WORLD_SIZE. The control is a process of torchrun's, which trains."""

    class Ended(Exception):
        """As a process that another one replaces."""

    done = []

    def ends(what):
        done.append(what)
        raise Ended

    (there := tmp_path / "there").touch()
    files = [f"--{flag}={there}" for flag in ("run", "model", "trace", "forget-trace", "output")]
    arguments = ["unlearn", *files, f"--data={tmp_path}", "--processes", "2"]
    monkeypatch.setattr(os, "execvp", lambda program, command: ends(command))
    run = PROJECT.run("tiny_a", "wmdp_tiny", "gd", "frozen_router", 0).model_copy(update={"processes": 2})
    monkeypatch.setattr(commands, "load_run", lambda file: run)
    monkeypatch.setattr(commands, "training_together", lambda *_: ends("trains"))
    monkeypatch.setattr(sys, "argv", ["gripmoe", *arguments])
    if leftover:
        monkeypatch.setenv(leftover, "1")
    with pytest.raises(Ended):
        main()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    assert done == [[*torchrun, "gripmoe.cli.main", *arguments]]
    done.clear()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with pytest.raises(Ended):
        main()
    assert done == ["trains"]


def test_a_process_alone_joins_no_group_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with distributed.launched():
        assert distributed.processes() == 1
