import json
from pathlib import Path

import pytest

import gripmoe
from gripmoe.cli import configure as commands
from gripmoe.cli.main import main
from gripmoe.config.grid import Project

CONFIG = Path(__file__).parents[2] / "workflow" / "config"


def exit_code(arguments):
    """Of the command line, which may end in an exit of its own."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


def test_mistakes_are_one_line_and_exit_2(tmp_path, capsys):
    assert main(["configure", "--settings", "{not json", "--output", str(tmp_path / "run.yaml")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("gripmoe configure: error: --settings: not valid JSON") and message.count("\n") == 1
    settings = json.dumps({"source": "embedded", "world_sed": 1})
    assert main(["prepare-data", "--settings", settings, "--output", str(tmp_path)]) == 2
    assert "world_sed: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize("bug", [ValueError, FileNotFoundError])
def test_a_bug_is_a_traceback(bug, tmp_path, monkeypatch):
    """And no mistake of the user's."""

    def broken(*_):
        raise bug("a bug")

    monkeypatch.setattr(commands, "write_yaml", broken)
    run = Project(CONFIG, "tiny").run("tiny_a", "wmdp_tiny", "gd", "anchored", 0)
    with pytest.raises(bug, match="a bug"):
        main(["configure", "--settings", run.model_dump_json(), "--output", str(tmp_path / "run.yaml")])


READ = {  # what commands ask for; {gone} is missing
    "--retain-corpus": "trace-routing --settings=null --model={there} --retain-corpus={gone} --forget-corpus={there}"
    " --digest={new} --forget-output={new} --output={new}",
    "--bases": "unlearn --run={there} --model={there} --data={there} --trace={there} --forget-trace={there}"
    " --bases={gone} --references={new} --output={new}",
    "--answers": "attack --settings=null --run={there} --benchmark=null --model={there} --checkpoint={there}"
    " --data={there} --answers={gone} --questions={new} --output={new}",
    "--questions": "rewrite --model=a --questions={gone} --output={new}",
    "cells": "collect {there} {gone} --histories={new} --answers={new} --attacks={new} --output={new}",
    "--manifest": "verify --manifest={gone}",
}


@pytest.mark.parametrize("flag", READ)
def test_a_missing_file_is_named_with_its_flag_before_anything_runs(flag, tmp_path, capsys):
    """Also where another command writes what has this name."""
    there, gone, new = tmp_path / "there", tmp_path / "gone", tmp_path / "new"
    there.touch()
    assert exit_code(READ[flag].format(there=there, gone=gone, new=new).split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert flag in line and str(gone) in line


@pytest.mark.parametrize("command", [["status"], ["plan"], ["pin"], ["why", "tiny_a"]])
@pytest.mark.parametrize("world", ["tinny", ""])
def test_an_unknown_world_is_one_line(command, world, monkeypatch, capsys):
    monkeypatch.chdir(CONFIG.parents[1])
    assert main([*command, "--world", world]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"gripmoe {command[0]}: error: world {world!r}: no world workflow/config/{world}.yaml; ")
    assert said.err.count("\n") == 1 and not said.out


def test_the_version(capsys):
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"gripmoe {gripmoe.__version__}\n"


@pytest.mark.parametrize("kind", ["letters", "news"])
def test_prepared_data_is_the_same_every_time(kind, tmp_path):
    settings = json.dumps({"source": "embedded", "kind": kind, "world_seed": 0})
    contents = []
    for name in ("a", "b"):
        assert main(["prepare-data", "--settings", settings, "--output", str(tmp_path / name)]) == 0
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.jsonl")})
    assert contents[0] == contents[1] and len(contents[0]) == {"letters": 7, "news": 6}[kind]
