"""Breaks a training cell again and again and counts what is lost: `python faults.py FOLDER FAULTS SEED` prints JSON.

A fault hits `gripmoe unlearn` at a random instant: kill -9; SIGTERM, as preemption and time limits send it; a disk that
is full in the middle of a file; a second trainer of the same cell. After a few faults the cell is left to end, and must
end with the weights and the history of an uninterrupted run, and with nothing else in its folder.
"""

import json
import os
import random
import resource
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path

import torch

from gripmoe.cli import main
from gripmoe.files import read_json

KINDS = ("kill", "terminate", "full disk", "second trainer")
FILES = {".lock", "checkpoint.json", "checkpoint.provenance.json", "history.json", "weights"}


def start(arguments: list[str], bytes_left: int | None = None) -> int:
    """A trainer in a process of its own, which need not import anything again."""
    if process := os.fork():
        return process
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        if bytes_left:
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, bytes_left))
        code = main(arguments)
    finally:
        os._exit(code)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def outcome(folder: Path) -> tuple:
    history = read_json(folder / "history.json")
    timeless = [{name: value for name, value in row.items() if "seconds" not in name} for row in history]
    return read_json(folder / "checkpoint.json")["weights"], timeless


def break_once(kind: str, arguments: list[str], folder: Path, seconds: float, luck: random.Random) -> tuple[str, bool]:
    """One fault; what came of it, and whether the cell has ended nevertheless."""
    if kind == "full disk":
        state = folder / "state.pt"
        size = state.stat().st_size if state.exists() else 100_000
        code = ended(start(arguments, bytes_left=luck.randrange(1, size)))
        return "stopped" if code else "escaped", code == 0
    first = start(arguments)
    if kind == "second trainer":
        time.sleep(luck.uniform(0.1, 0.4) * seconds)
        code = ended(start(arguments))
        both = code != 2 and os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        came = "refused" if code == 2 else "DUPLICATE" if both else "came too late"
        return came, ended(first) == 0
    time.sleep(luck.uniform(0, 1.1) * seconds)
    os.kill(first, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
    code = ended(first)
    return "stopped" if code else "escaped", code == 0


def figures(prepared: dict, root: Path, faults: int, seed: int) -> dict:
    def arguments(folder: Path) -> list[str]:
        folder.mkdir()
        return [
            "unlearn",
            *(f"--{name}={value}" for name, value in prepared.items()),
            f"--output={folder}/checkpoint.json",
        ]

    command = arguments(root / "whole")
    began = time.monotonic()
    assert ended(start(command)) == 0
    seconds = time.monotonic() - began
    expected = outcome(root / "whole")
    luck, counts, injected, cells, resumed = random.Random(seed), Counter(), 0, 0, 0
    while injected < faults:
        cells += 1
        folder = root / f"cell{cells}"
        command, done = arguments(folder), False
        for _ in range(luck.randrange(1, 7)):
            if done:
                break
            kind = luck.choice(KINDS)
            resumed += (folder / "state.pt").exists()
            came, done = break_once(kind, command, folder, seconds, luck)
            counts[f"{kind}: {came}"] += 1
            injected += 1
        if not done:
            resumed += (folder / "state.pt").exists()
            assert ended(start(command)) == 0
        counts["results lost"] += outcome(folder) != expected
        counts["files left over"] += len({file.name for file in folder.iterdir()} ^ FILES)
    duplicates = sum(count for name, count in counts.items() if "DUPLICATE" in name)
    return {
        "faults": injected,
        "cells": cells,
        "resumed": resumed,
        "duplicates": duplicates,
        **dict(sorted(counts.items())),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = Namespace(folder=Path(sys.argv[1]), faults=int(sys.argv[2]), seed=int(sys.argv[3]))
    import gripmoe.commands.unlearn  # noqa: F401, before the first fork

    print(json.dumps(figures(read_json(given.folder / "flags.json"), given.folder, given.faults, given.seed), indent=1))
