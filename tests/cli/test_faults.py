"""Nothing lost, nothing twice: faults at random instants. GRIPMOE_FAULTS=500 for more of them."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_every_method import OBJECTIVES, PROJECT, TRAINING, prepare, with_questions

from conftest import held
from gripmoe.cli.main import load, main
from gripmoe.config.benchmarks import Benchmark
from gripmoe.io.files import read_yaml, write_json, write_yaml

FAULTS = int(os.environ.get("GRIPMOE_FAULTS", 12))


@pytest.fixture(scope="module")
def trainer(world, tokenizer, tmp_path_factory):
    """Flags of a run to train, with a checkpoint every three steps."""
    folder = tmp_path_factory.mktemp("trainer")
    root, benchmark, files = prepare("qwen3_moe", world, tokenizer, folder / "prepared")
    with_questions(root, world)
    more = {"max_steps": 204, "check_every": 3, "checkpoint_every": 3, "objective": OBJECTIVES["gd"]}
    run = PROJECT.run("tiny_a", "wmdp_tiny", "gd", "anchored", 0)
    run = run.model_copy(update={"benchmark": benchmark.task, "training": TRAINING.model_copy(update=more)})
    write_yaml(folder / "run.yaml", run.model_dump(mode="json"))
    flags = dict(
        run=folder / "run.yaml", model=root / "model/model.json", data=root / "data", trace=files["trace_file"]
    )
    flags["forget-trace"] = files["forget_trace_file"]
    return {name: str(value) for name, value in flags.items()}


def every_step(trainer, folder):
    """Flags of each step of a run, of which it writes into {run}; what follows training is of a run in `folder`."""
    run = PROJECT.run("tiny_a", "wmdp_tiny", "gd", "ptc", 0)
    shared = read_yaml(Path(trainer["run"]))["benchmark"]
    write_yaml(folder / "ptc.yaml", {**run.model_dump(mode="json"), "benchmark": shared})
    trained = {"model": trainer["model"], "checkpoint": f"{folder}/unlearn/whole/checkpoint.json"}
    benchmark = Benchmark(**shared, evaluation_batch_size=64).model_dump_json()
    measured = {
        "run": trainer["run"],
        "benchmark": benchmark,
        **trained,
        "data": trainer["data"],
        "questions": "{run}/questions.csv",
    }
    return {
        "unlearn": {**trainer, "output": "{run}/checkpoint.json"},
        "realign": {
            "run": f"{folder}/ptc.yaml",
            **trained,
            "retain-corpus": f"{trainer['data']}/retain_corpus.jsonl",
            "trace": trainer["trace"],
            "output": "{run}/checkpoint.json",
        },
        "evaluate": {**measured, "output": "{run}/evaluation.json"},
        "attack": {
            **measured,
            "settings": "null",
            "output": "{run}/attack.json",
        },
    }


@pytest.mark.nightly
def test_faults_at_random_instants_lose_and_double_nothing(trainer, tmp_path):
    write_json(tmp_path / "flags.json", every_step(trainer, tmp_path))
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name("faults.py"), tmp_path, str(FAULTS), "0"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    print(ended.stdout)
    found = json.loads(ended.stdout)
    unlocked = found.pop("without a lock")
    assert unlocked["duplicates"] > 0, f"the control: two processes side by side are seen: {unlocked}"
    assert found.keys() == {"unlearn", "realign", "evaluate", "attack"}
    for step, figures in found.items():
        assert figures["results lost"] == figures["duplicates"] == figures["files left over"] == 0, f"{step}: {figures}"
        assert figures["faults"] >= FAULTS // 5, f"{step}: {figures}"
        assert figures["resumed"] >= figures["between checkpoints"], f"{step}: {figures}"
    hit = found["unlearn"]
    assert hit["resumed"] > 1 and hit["between checkpoints"] > 1, f"the faults did hit something: {hit}"


@pytest.mark.parametrize("step", ["unlearn", "realign", "evaluate", "attack"])
def test_of_two_processes_on_a_run_one_is_refused(step, tmp_path, monkeypatch, capsys):
    """Whatever steps they take; and the control: alone, the same command gets beyond the lock."""

    class BeyondTheLock(Exception):
        pass

    def loaded(*_, **__):
        raise BeyondTheLock

    monkeypatch.setattr(importlib.import_module(f"gripmoe.cli.{step}"), "load_model", loaded)
    run = PROJECT.run("tiny_a", "wmdp_tiny", "gd", "ptc" if step == "realign" else "anchored", 0)
    write_yaml(tmp_path / "run.yaml", run.model_dump(mode="json"))
    write_json(tmp_path / "model.json", {"weights": "0"})
    benchmark = PROJECT.benchmarks["wmdp_tiny"].model_dump_json()
    given = {"settings": "null", "benchmark": benchmark, "run": tmp_path / "run.yaml", "model": tmp_path / "model.json"}
    folder = tmp_path / "run"
    flags = [option.opts[0].removeprefix("--") for option in load(step).params if option.required]
    paths = {flag: folder / "result.json" if flag == "output" else tmp_path / flag for flag in flags}
    paths["data"] = tmp_path
    for flag in {"trace", "forget-trace", "retain-corpus"} & set(flags):
        paths[flag].touch()
    if "checkpoint" in flags:
        write_json(paths["checkpoint"], {"weights": "0", "status": "reached", "steps": 1})
    arguments = [step, *(f"--{flag}={({**paths, **given})[flag]}" for flag in flags)]
    with held(folder) as owner:
        assert main(arguments) == 2
        assert f"process {owner} on" in capsys.readouterr().err
        assert [file.name for file in folder.iterdir()] == [".lock"]
    with pytest.raises(BeyondTheLock):
        main(arguments)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of almost no size, and what gives it another size; skips, and so is reported as not
    run, where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", *options, "tmpfs", folder], check=False).returncode == 0

    if os.geteuid() or not mount("size=64k"):
        pytest.skip("not run: only root mounts a file system")
    try:
        yield folder, lambda size: mount(f"remount,size={size}")
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_loses_nothing(trainer, small_disk, tmp_path, capsys):
    """A checkpoint finds no room beside the one before, which is whole; with room the run goes on to the same bytes."""
    disk, resize = small_disk
    run = read_yaml(Path(trainer["run"]))
    write_yaml(tmp_path / "run.yaml", {**run, "training": {**run["training"], "max_steps": 9}})

    def train(folder):
        flags = {**trainer, "run": tmp_path / "run.yaml", "output": folder / "checkpoint.json"}
        return main(["unlearn", *(f"--{name}={value}" for name, value in flags.items())])

    assert train(tmp_path / "whole") == 0
    weights = tmp_path / "whole/weights/model.safetensors"
    resize(3 * weights.stat().st_size)  # weights and AdamW's two states of what trains: no room for two such files
    assert train(disk / "run") == 2
    assert f"{disk}/run/state.pt: no room to write it" in capsys.readouterr().err
    assert {file.name for file in (disk / "run").iterdir()} == {".lock", "state.pt", "state.identity.json"}
    assert torch.load(disk / "run/state.pt", weights_only=True)["progress"]["step"] == 3
    resize(20 * weights.stat().st_size)
    assert train(disk / "run") == 0
    assert "resumes at step 3" in capsys.readouterr().err
    assert weights.read_bytes() == (disk / "run/weights/model.safetensors").read_bytes()
    assert not (disk / "run/state.pt").exists()
