"""Breaks the steps of a run again and again and counts what is lost: `python faults.py FOLDER FAULTS SEED`.

A fault hits `gripmoe unlearn`, `realign`, `evaluate` or `attack` at a random instant of its work: kill -9; SIGTERM, as
preemption and time limits send it; a disk that is full in the middle of a file; a second process on the same run.
After a few faults the step is left to end, and must end with the files of an uninterrupted run, to the byte, and with
no others. Instants are of processor time, and who worked when is what the processes note: a busy machine changes
neither.
"""

import fcntl
import json
import os
import random
import resource
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import psutil
import torch

from gripmoe.cli.main import main
from gripmoe.io.files import read_json

STEPS = ("unlearn", "realign", "evaluate", "attack")
KINDS = ("kill", "terminate", "full disk", "second process")
RESUMED_FROM = ("state.pt", "attack_state.json")
MEASURED = (".lock", ".provenance.json")  # what differs from one run to the next


def start(arguments: list[str], bytes_left: int | None = None, diary: Path | None = None) -> int:
    """A step in a process of its own, which need not import anything again; it notes in the diary when it gets a lock
    and when it has put a file in its place."""
    if process := os.fork():
        return process
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        if bytes_left:
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, bytes_left))
        if diary:
            fcntl.flock, os.replace = noted(fcntl.flock, diary), noted(os.replace, diary)
        code = main(arguments)
    finally:
        os._exit(code)


def noted(function: Callable, diary: Path) -> Callable:
    def call(*arguments):
        result = function(*arguments)
        with diary.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return result

    return call


def let_work(process: int, seconds: float) -> None:
    """Returns once it has worked so long, or has ended."""
    worker = psutil.Process(process)
    while worker.status() != psutil.STATUS_ZOMBIE and sum(worker.cpu_times()[:2]) < seconds:
        time.sleep(0.005)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def outcome(folder: Path) -> dict[str, object]:
    """What a step has left: the content of every file, without times."""
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {name: None if name.endswith(MEASURED) else timeless(file) for name, file in files.items()}


def timeless(file: Path) -> object:
    if file.suffix != ".json":
        return file.read_bytes()

    def without(pairs):
        return {name: value for name, value in pairs if "seconds" not in name and name != "time_ratio"}

    return json.loads(file.read_text(), object_pairs_hook=without)


def interrupted(folder: Path) -> bool:
    return any((folder / name).exists() for name in RESUMED_FROM)


def break_once(
    kind: str, arguments: list[str], folder: Path, size: int, seconds: float, luck: random.Random
) -> tuple[str, bool]:
    """One fault in a step that works for `seconds` and writes a file of `size`; what came of it, and whether the step
    has ended nevertheless."""
    if kind == "full disk":
        code = ended(start(arguments, bytes_left=luck.randrange(1, size)))
        return "stopped" if code else "escaped", code == 0
    if kind == "second process":
        diary = folder.with_suffix(".diary")
        diary.unlink(missing_ok=True)
        first = start(arguments, diary=diary)
        let_work(first, luck.uniform(0.1, 0.4) * seconds)
        second = start(arguments, diary=diary)
        codes = [ended(first), ended(second)]
        turns = [worker for worker, _ in groupby(diary.read_text().split())]
        beside = len(turns) > len(set(turns))  # one worked, then the other, then the one again
        return "DUPLICATE" if beside else "refused" if 2 in codes else "came too late", 0 in codes
    first = start(arguments)
    let_work(first, luck.uniform(0, 1.1) * seconds)
    os.kill(first, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
    code = ended(first)
    return "stopped" if code else "escaped", code == 0


def figures(step: str, flags: dict[str, str], root: Path, faults: int, seed: int, kinds: Sequence[str] = KINDS) -> dict:
    """Counts of what faults in a step came to; its files go below `root`."""

    def arguments(folder: Path) -> list[str]:
        folder.mkdir(parents=True)
        paths = {name: value.replace("{run}", str(folder)) for name, value in flags.items()}
        return [step, *(f"--{name}={value}" for name, value in paths.items())]

    command = arguments(root / "whole")
    began = time.monotonic()
    _, status, used = os.wait4(start(command), 0)
    assert status == 0
    seconds = used.ru_utime + used.ru_stime
    expected = outcome(root / "whole")
    size = max(file.stat().st_size for file in (root / "whole").rglob("*"))
    luck, counts, injected, runs, resumed = random.Random(f"{step} {seed}"), Counter(), 0, 0, 0
    while injected < faults:
        runs += 1
        folder = root / f"run{runs}"
        command, done = arguments(folder), False
        for _ in range(luck.randrange(1, 7)):
            if done:
                break
            kind = luck.choice(kinds)
            resumed += interrupted(folder)
            came, done = break_once(kind, command, folder, size, seconds, luck)
            counts[f"{kind}: {came}"] += 1
            injected += 1
        if not done:
            resumed += interrupted(folder)
            assert ended(start(command)) == 0
        found = outcome(folder)
        counts["results lost"] += any(found.get(name, b"") != content for name, content in expected.items())
        counts["files left over"] += len(found.keys() - expected.keys())
    duplicates = sum(count for name, count in counts.items() if "DUPLICATE" in name)
    return {
        "faults": injected,
        "runs": runs,
        "resumed": resumed,
        "duplicates": duplicates,
        "seconds": round(time.monotonic() - began),
        **dict(sorted(counts.items())),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = Namespace(folder=Path(sys.argv[1]), faults=int(sys.argv[2]), seed=int(sys.argv[3]))
    import gripmoe.cli.attack
    import gripmoe.cli.evaluate
    import gripmoe.cli.unlearn  # noqa: F401, before the first fork

    flags, found = read_json(given.folder / "flags.json"), {}
    for step in STEPS:
        faults = given.faults if step == "unlearn" else given.faults // 5
        found[step] = figures(step, flags[step], given.folder / step, faults, given.seed)
    fcntl.flock = lambda *_: None
    root, kinds = given.folder / "control", ("second process",)
    found["without a lock"] = figures("realign", flags["realign"], root, 3, given.seed, kinds)
    print(json.dumps(found, indent=1))
