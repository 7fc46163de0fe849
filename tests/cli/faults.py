"""Breaks the steps of a run again and again and counts what is lost: `python faults.py FOLDER FAULTS SEED`.

A fault hits `gripmoe unlearn`, `realign`, `evaluate` or `attack` at a random instant of its work: kill -9; SIGTERM, as
preemption and time limits send it; a disk that is full in the middle of a file; a second process on the same run.
Of a step with checkpoints the first fault of two runs in three hits between two of them, so that the run resumes from
one. After a few faults the step is left to end, and must end with the files of an uninterrupted run, to the byte, and
with no others. Instants are of processor time, who worked when is what the processes note, and a process that must not
get further before a fault hits it stops itself: a busy machine changes nothing.
"""

import fcntl
import importlib
import itertools
import json
import os
import random
import resource
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from gripmoe.cli.fork_server import IMPORTED
from gripmoe.cli.main import main
from gripmoe.io.files import read_json

STEPS = ("unlearn", "realign", "evaluate", "attack")
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
KINDS = (*SIGNALS, "full disk", "second process")
RESUMED_FROM = ("state.pt", "attack_state.json")
LAST = ".provenance.json"  # a step writes it at its end
MEASURED = (".lock", LAST)  # what differs from one run to the next
Stops = tuple[str | tuple[str, ...], Container[int]]  # ends of names of files, and which of these files


def start(
    arguments: list[str], bytes_left: int | None = None, diary: Path | None = None, stops: Stops | None = None
) -> int:
    """A step in a process of its own, which need not import anything again; it notes in the diary when it gets a lock
    and when it has put a file in its place, and stops itself before it puts a file of `stops` in its place."""
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
        if stops:
            os.replace = stopping(os.replace, *stops)
        code = main(arguments)
    finally:
        os._exit(code)


def noted(function: Callable, diary: Path) -> Callable:
    def call(*arguments):
        result = function(*arguments)
        with diary.open("a") as file:
            file.write(f"{os.getpid()} {arguments[1]}\n")
        return result

    return call


def stopping(replace: Callable, names: str | tuple[str, ...], numbers: Container[int]) -> Callable:
    count = itertools.count(1)

    def call(temporary, file):
        if str(file).endswith(names) and next(count) in numbers:
            os.kill(os.getpid(), signal.SIGSTOP)
        return replace(temporary, file)

    return call


def stopped(process: int) -> bool:
    """Returns once it has stopped itself, or has ended: whether it has stopped."""
    return os.waitid(os.P_PID, process, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED


def worked(process: int) -> float:
    return sum(psutil.Process(process).cpu_times()[:2])


def let_work(process: int, seconds: float) -> None:
    """Returns once it has worked so long, has stopped itself or has ended."""
    no_more = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    while psutil.Process(process).status() not in no_more and worked(process) < seconds:
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
        first = start(arguments, diary=diary, stops=(LAST, {1}))  # it has not ended before the second has begun
        let_work(first, luck.uniform(0.1, 0.4) * seconds)
        second = start(arguments, diary=diary, stops=("", {1}))
        for process in (second, first):  # the second stops only if no lock refuses it
            if stopped(process):
                os.kill(process, signal.SIGCONT)
        codes = [ended(first), ended(second)]
        turns = [worker for worker, _ in itertools.groupby(line.split()[0] for line in diary.open())]
        beside = len(turns) > len(set(turns))  # one worked, then the other, then the one again
        return "DUPLICATE" if beside else "refused" if 2 in codes else "came too late", 0 in codes
    first = start(arguments)
    let_work(first, luck.uniform(0, 1.1) * seconds)
    os.kill(first, SIGNALS[kind])
    code = ended(first)
    return "stopped" if code else "escaped", code == 0


def break_between_checkpoints(
    kind: str, arguments: list[str], checkpoints: int, seconds: float, luck: random.Random
) -> None:
    """A signal hits a step that works for `seconds`, and that has nothing to resume from, after one of its checkpoints
    and before the second after it."""
    number = luck.randrange(2, checkpoints)
    process = start(arguments, stops=(RESUMED_FROM, {number, number + 1}))
    assert stopped(process), f"ended before checkpoint {number} of {checkpoints}"
    instant = worked(process) + luck.uniform(0, seconds / checkpoints)
    os.kill(process, signal.SIGCONT)
    let_work(process, instant)
    os.kill(process, SIGNALS[kind])
    os.kill(process, signal.SIGCONT)  # a process that has stopped gets no SIGTERM
    assert ended(process) == -SIGNALS[kind]


def figures(step: str, flags: dict[str, str], root: Path, faults: int, seed: int, kinds: Sequence[str] = KINDS) -> dict:
    """Counts of what faults in a step came to; its files go below `root`."""

    def arguments(folder: Path) -> list[str]:
        folder.mkdir(parents=True)
        paths = {name: value.replace("{run}", str(folder)) for name, value in flags.items()}
        return [step, *(f"--{name}={value}" for name, value in paths.items())]

    command = arguments(root / "whole")
    began, diary = time.monotonic(), root / "whole.diary"
    _, status, used = os.wait4(start(command, diary=diary), 0)
    assert status == 0
    checkpoints = sum(line.rstrip().endswith(RESUMED_FROM) for line in diary.open())
    seconds = used.ru_utime + used.ru_stime
    expected = outcome(root / "whole")
    size = max(file.stat().st_size for file in (root / "whole").rglob("*"))
    luck, counts, injected, runs, between, resumed = random.Random(f"{step} {seed}"), Counter(), 0, 0, 0, 0
    while injected < faults:
        runs += 1
        folder = root / f"run{runs}"
        command, done = arguments(folder), False
        for number in range(luck.randrange(1, 7)):
            if done:
                break
            resumed += interrupted(folder)
            if checkpoints > 2 and number == 0 and runs % 3:
                kind, came = luck.choice(list(SIGNALS)), "stopped between checkpoints"
                break_between_checkpoints(kind, command, checkpoints, seconds, luck)
                between += 1
            else:
                kind = luck.choice(kinds)
                came, done = break_once(kind, command, folder, size, seconds, luck)
            counts[f"{kind}: {came}"] += 1
            injected += 1
        if not done:
            resumed += interrupted(folder)
            code = ended(start(command))
            assert code == 0, f"{step} ends with {code} after {dict(counts)}"
        found = outcome(folder)
        counts["results lost"] += any(found.get(name, b"") != content for name, content in expected.items())
        counts["files left over"] += len(found.keys() - expected.keys())
    duplicates = sum(count for name, count in counts.items() if "DUPLICATE" in name)
    return {
        "faults": injected,
        "runs": runs,
        "between checkpoints": between,
        "resumed": resumed,
        "duplicates": duplicates,
        "seconds": round(time.monotonic() - began),
        **dict(sorted(counts.items())),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = Namespace(folder=Path(sys.argv[1]), faults=int(sys.argv[2]), seed=int(sys.argv[3]))
    for name in (*IMPORTED, *(f"gripmoe.cli.{step}" for step in STEPS)):  # before the first fork
        with suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(name)
    flags, found = read_json(given.folder / "flags.json"), {}
    try:
        for step in STEPS:
            faults = given.faults if step == "unlearn" else given.faults // 5
            found[step] = figures(step, flags[step], given.folder / step, faults, given.seed)
        fcntl.flock = lambda *_: None
        root, kinds = given.folder / "control", ("second process",)
        found["without a lock"] = figures("realign", flags["realign"], root, 3, given.seed, kinds)
    finally:
        for process in psutil.Process().children():  # one that has stopped itself would stay
            process.kill()
    print(json.dumps(found, indent=1))
