"""Commands that start as copies of a process with its imports."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import HANGS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="not run: no server without Linux")
WITH_EVERYTHING = [sys.executable, "-m", "gripmoe.cli.fork_server"]
# The same, with fewer imports than commands need: seconds less for each test.
SERVER = [
    sys.executable,
    "-c",
    "import sys; from gripmoe.cli import fork_server as s; s.IMPORTED = ('torch',); s.exec_beside_server(sys.argv[1:])",
]
GRIPMOE = [sys.executable, "-X", "importtime", "-m", "gripmoe.cli.main"]


def run(*command, **options):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("served", [True, False])
def test_a_command_imports_nothing_itself(served):
    """`-X importtime` lists what the process imports that was asked, not its copy of the server."""
    result = run(*WITH_EVERYTHING * served, *GRIPMOE, "evaluate", "--help")
    assert result.returncode == 0 and "Measure a run." in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time:" in line}
    assert "gripmoe.cli.fork_server" in imported
    assert ("torch" in imported) != served


def test_a_command_has_the_streams_folder_and_environment_of_who_asks_and_its_exit_code(tmp_path):
    (tmp_path / "run.yaml").write_text("{}")
    command = f"cd {tmp_path}; {' '.join(GRIPMOE)} summary --runs there.csv 2> errors; echo $? > code"
    result = run(*SERVER, "sh", "-c", f"{command}; exit 7")
    assert result.returncode == 7 and "Exception in thread" not in result.stderr
    assert (tmp_path / "code").read_text() == "2\n"
    assert "there.csv" in (tmp_path / "errors").read_text().splitlines()[-1]


def test_a_command_that_cannot_start_fails_and_leaves_the_server(tmp_path):
    """What the folder of whoever asks is, is only known where the command runs: this one is gone by then."""
    (folder := tmp_path / "gone").mkdir()
    asked = "import os, sys; from gripmoe.cli import fork_server; os.getcwd = lambda: sys.argv[1]; "
    asked += "print(fork_server.run_on_server(['--version']), flush=True)"
    folder.rmdir()
    both = 'for folder in "$1" "$2"; do "$3" -c "$4" "$folder"; done'
    result = run(*SERVER, "sh", "-c", both, "sh", folder, tmp_path, sys.executable, asked)
    assert result.stdout.splitlines()[0] == "1" and "FileNotFoundError" in result.stderr
    assert result.stdout.splitlines()[-1] == "0", "the next command runs on the same server"


def test_a_command_finds_code_of_ones_own_where_its_environment_says(tmp_path):
    """The server has started without that folder."""
    config, own = tmp_path / "workflow" / "config", tmp_path / "own"
    shutil.copytree(Path(__file__).parents[2] / "workflow" / "config", config)
    own.mkdir()
    (own / "my_losses.py").write_text("class Mine:\n    pass\n")
    (config / "objectives.yaml").write_text('mine: {class: "my_losses:Mine", settings: [alpha]}\n')
    world = "objectives: [mine]\nobjective_training: {mine: {objective: {alpha: 1.0}}}\noverrides: {}\n"
    (config / "mine.yaml").write_text(f"extends: tiny\nmethods: [original, unconstrained]\n{world}")
    status = f"{' '.join(GRIPMOE)} status --world mine"
    found = run(*SERVER, "sh", "-c", f"{status}; PYTHONPATH=own:$PYTHONPATH {status}", cwd=tmp_path)
    assert "no module 'my_losses'" in found.stderr, "the control: without it"
    assert found.returncode == 0 and "unconstrained" in found.stdout


@pytest.mark.parametrize("threads", ["1", "1,1", "many"])
def test_a_mistake_is_a_mistake_whatever_the_number_of_threads(threads):
    result = run(*SERVER, *GRIPMOE, "no-such-command", env={**os.environ, "OMP_NUM_THREADS": threads})
    assert result.returncode == 2 and "no-such-command" in result.stderr


def until(condition):
    deadline = time.monotonic() + HANGS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_ends_with_the_process_that_asked_for_it(how, tmp_path):
    """And the server with the program beside it."""
    os.mkfifo(pipe := tmp_path / "manifest.json")  # who reads it waits
    asking = f"{sys.executable} -m gripmoe.cli.main verify --manifest {pipe}"
    program = subprocess.Popen([*SERVER, "sh", "-c", f"{asking} & read _"], stdin=subprocess.PIPE)
    below = psutil.Process(program.pid)
    asked = until(lambda: [each for each in below.children() if "verify" in each.cmdline()])[0]
    server = next(each for each in below.children() if each != asked)
    command = until(lambda: [each for each in server.children(recursive=True) if each.ppid() != server.pid])[0]
    asked.send_signal(how)
    command.wait(HANGS)
    program.communicate(b"\n", HANGS)
    server.wait(HANGS)


def test_a_command_does_not_start_again_where_the_process_that_waits_for_it_is_killed(tmp_path):
    os.mkfifo(pipe := tmp_path / "manifest.json")  # who reads it waits
    asking = f"{sys.executable} -m gripmoe.cli.main verify --manifest {pipe}"
    program = subprocess.Popen([*SERVER, "sh", "-c", f"{asking}; echo $?"], stdout=subprocess.PIPE, text=True)
    server = until(lambda: [each for each in psutil.Process(program.pid).children() if "verify" not in each.cmdline()])
    command = until(lambda: [each for each in server[0].children(recursive=True) if each.ppid() != server[0].pid])[0]
    command.parent().kill()
    program.wait(HANGS)  # a second start would wait for the pipe
    command.kill()
    assert program.communicate(timeout=HANGS)[0] == "1\n"


@pytest.mark.parametrize("left", [False, True])
def test_where_the_server_has_ended_commands_start_as_usual(left, tmp_path):
    """As beside a GPU; its socket may still be there."""
    address = tmp_path / "socket"
    if left:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
    result = run(*GRIPMOE, "--version", env={**os.environ, "GRIPMOE_FORK_SERVER": str(address)})
    assert result.returncode == 0 and result.stdout.startswith("gripmoe ")


def test_without_a_server_commands_start_as_usual(tmp_path):
    """Here the path of its socket would be too long."""
    (long := tmp_path / ("x" * 120)).mkdir()
    result = run(*SERVER, *GRIPMOE, "--version", env={**os.environ, "TMPDIR": str(long)})
    assert result.returncode == 0 and result.stdout.startswith("gripmoe ")
    assert not list(long.glob("gripmoe-*")), "no folder of the server stays"
