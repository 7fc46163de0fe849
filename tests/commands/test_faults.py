"""Nothing lost, nothing twice: faults at random instants. GRIPMOE_FAULTS=500 for more of them."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_every_method import OBJECTIVES, PROJECT, TRAINING, prepare

from conftest import held
from gripmoe.cli import COMMANDS, main
from gripmoe.files import write_json, write_yaml

FAULTS = int(os.environ.get("GRIPMOE_FAULTS", 24))


def test_faults_at_random_instants_lose_and_double_nothing(world, tokenizer, tmp_path):
    root, benchmark, files = prepare("qwen3_moe", world, tokenizer, tmp_path / "prepared")
    more = {"max_steps": 150, "check_every": 3, "checkpoint_every": 3, "objective": OBJECTIVES["gd"]}
    run = PROJECT.run("tiny_a", "wmdp_tiny", "gd", "anchored", 0)
    run = run.model_copy(update={"benchmark": benchmark, "training": TRAINING.model_copy(update=more)})
    write_yaml(tmp_path / "run.yaml", run.model_dump(mode="json"))
    flags = dict(run=tmp_path / "run.yaml", model=root / "model/model.json", data=root / "data", trace=files["trace"])
    flags["forget-trace"] = files["forget_trace"]
    write_json(tmp_path / "flags.json", {name: str(value) for name, value in flags.items()})
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name("faults.py"), tmp_path, str(FAULTS), "0"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    figures = json.loads(ended.stdout)
    print(ended.stdout)
    assert figures["results lost"] == figures["duplicates"] == figures["files left over"] == 0
    assert figures["faults"] >= FAULTS and figures["resumed"] > 3, "the faults did hit something"


@pytest.mark.parametrize("step", ["unlearn", "realign", "evaluate", "attack"])
def test_of_two_processes_on_a_cell_one_is_refused(step, tmp_path, monkeypatch, capsys):
    """Whatever steps they take; and the control: alone, the same command gets beyond the lock."""

    class BeyondTheLock(Exception):
        pass

    def loaded(*_, **__):
        raise BeyondTheLock

    command = next(command for command in COMMANDS if command.function == step)
    monkeypatch.setattr(importlib.import_module(f"gripmoe.commands.{command.module}"), "load_model", loaded)
    run = PROJECT.run("tiny_a", "wmdp_tiny", "gd", "anchored", 0)
    write_yaml(tmp_path / "run.yaml", run.model_dump(mode="json"))
    write_json(tmp_path / "model.json", {"weights": "0"})
    given = {"settings": "null", "run": tmp_path / "run.yaml", "model": tmp_path / "model.json"}
    cell = tmp_path / "cell"
    paths = {flag: cell / "result.json" if flag == "output" else tmp_path / flag for flag in command.flags}
    arguments = [step, *(f"--{flag}={path}" for flag, path in {**paths, **given}.items() if flag in paths)]
    with held(cell) as owner:
        assert main(arguments) == 2
        assert f"process {owner} on" in capsys.readouterr().err
        assert [file.name for file in cell.iterdir()] == [".lock"]
    with pytest.raises(BeyondTheLock):
        main(arguments)
