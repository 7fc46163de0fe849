"""Runs a program, within which each `gripmoe` command starts as a copy of a process that has imported torch.

    python -m gripmoe.cli.fork_server snakemake --cores 2

Imports take 4 s of a command. `make figures` starts 100 commands. The process imports nothing of this package, so a
command runs the code that is there when it starts. Without Linux, or with a GPU, commands start as usual.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

ADDRESS = "GRIPMOE_FORK_SERVER"
IMPORTED = (
    "lm_eval.evaluator",
    "lm_eval.models.huggingface",
    "peft",
    "pydantic",
    "sklearn.linear_model",
    "torch",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
STANDARD_STREAMS = (0, 1, 2)
STARTED = "started\n"  # a command that has started must not start a second time


def exec_beside_server(command: Sequence[str]) -> NoReturn:
    """Replaces this process by `command`, and starts a server that ends with it."""
    if sys.platform == "linux":
        with suppress(OSError):  # the path of a socket may be too long; commands then start as usual
            _start()
    os.execvp(command[0], command)


def _start() -> None:
    folder = tempfile.mkdtemp(prefix="gripmoe-")  # of this user alone
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address := str(Path(folder, "socket")))
        listener.listen()  # a command that comes before the imports are done waits for them
    except OSError:
        listener.close()
        shutil.rmtree(folder)
        raise
    process = os.getpid()
    if os.fork() == 0:
        try:
            _serve(listener, process)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
    os.environ[ADDRESS] = address


def run_on_server(arguments: Sequence[str]) -> int | None:
    """Runs `gripmoe` with `arguments` on the server that the environment names, with the streams, folder and
    environment of this process. Returns the exit code, 1 if the server's process for the command is lost, or None if
    there is no server."""
    address = os.environ.get(ADDRESS)
    if not address:
        return None
    with socket.socket(socket.AF_UNIX) as connection:
        answers = connection.makefile()
        try:
            connection.connect(address)
            asked = {"arguments": list(arguments), "folder": os.getcwd(), "environment": dict(os.environ)}
            socket.send_fds(connection, [b"."], STANDARD_STREAMS)
            connection.sendall(json.dumps(asked).encode() + b"\n")
            has_started = answers.readline() == STARTED
        except OSError:  # the server has ended, as beside a GPU
            has_started = False
        if not has_started:
            return None
        with suppress(OSError):
            if code := answers.readline():
                return int(code)
    print("gripmoe: the process that waited for this command was killed; the command may still run", file=sys.stderr)
    return 1


def _serve(listener: socket.socket, process: int) -> None:
    """Answers connections until `process`, the parent, has ended. Forks twice for each: a process that runs the
    command, and its parent, which reports how it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in IMPORTED:
        with suppress(ImportError):  # of an extra that is not installed, as the command then says
            importlib.import_module(name)
    if sys.modules["torch"].accelerator.is_available():
        return  # a GPU's driver does not survive a fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.settimeout(1.0)
    while os.getppid() == process:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    _answer(connection)
                finally:
                    os._exit(1)  # or the copy would end as the server does, and remove its folder
            connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    _, streams, _, _ = socket.recv_fds(connection, 1, len(STANDARD_STREAMS))
    asked = json.loads(connection.makefile().readline())
    connection.sendall(STARTED.encode())
    command = os.fork()
    if command == 0:
        connection.close()
        _become(streams, **asked)
    ended = threading.Event()
    threading.Thread(target=_end_with_the_client, args=(connection, command, ended), daemon=True).start()
    _, status = os.waitpid(command, 0)
    ended.set()
    with suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _end_with_the_client(connection: socket.socket, command: int, ended: threading.Event) -> None:
    connection.recv(1)  # nothing comes until the client has closed the connection
    if not ended.is_set():
        os.kill(command, signal.SIGTERM)


def _become(streams: Sequence[int], arguments: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    for stream, standard in zip(streams, STANDARD_STREAMS, strict=True):
        os.dup2(stream, standard)
        os.close(stream)
    try:
        code = _run(arguments, folder, environment)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _run(arguments: list[str], folder: str, environment: dict[str, str]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    del environment[ADDRESS]
    os.environ.clear()
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):  # torch read it before
        with suppress(ValueError):  # OpenMP allows a list, for nested levels
            sys.modules["torch"].set_num_threads(int(threads.partition(",")[0]))
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[1:1] = given  # this process may have started with another PYTHONPATH
    sys.argv = ["gripmoe", *arguments]
    from gripmoe.cli.main import main

    try:
        return main(arguments)
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
            return 1
        return exit.code or 0


if __name__ == "__main__":
    exec_beside_server(sys.argv[1:])
