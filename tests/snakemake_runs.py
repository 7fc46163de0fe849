"""Runs Snakemake for tests, and reads what it prints."""

import os
import re
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SMOKE = ROOT / "tests" / "workflow" / "smoke.yaml"
BIN = Path(sys.executable).parent
# Half the time of a dry run goes into imports, so Snakemake starts as a copy of a process that has made them. That
# process imports nothing of gripmoe, whose code is that of `root`.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["snakemake.cli", "smart_open", "snakemake_executor_plugin_slurm"])


def snakemake(*arguments, directory, check=True, root=ROOT, path=BIN, rules=None):
    """What Snakemake prints in the checkout `root`, with the working folder `directory`."""
    call = _arguments(arguments, directory, root) + (["--allowed-rules", rules] if rules else [])
    with TemporaryDirectory() as folder:
        file = Path(folder, "output")
        process = FORKS.Process(target=_become_snakemake, args=(call, root, _environment(root, path), file))
        process.start()
        process.join()
        output = file.read_text()
    assert not check or process.exitcode == 0, output[-5000:]
    return output


def run_with_server(*arguments, directory, root=ROOT):
    """Jobs run, as by `make figures`."""
    command = [sys.executable, "-m", "gripmoe.cli.fork_server", sys.executable, "-m", "snakemake"]
    command += _arguments(arguments, directory, root)
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root, env=_environment(root, BIN)
    )
    assert result.returncode == 0, result.stdout[-5000:]
    return result.stdout


def planned(output):
    """Jobs by rule in a dry run's closing table."""
    if "Nothing to be done" in output:
        return {}
    table = output.split("Job stats:")[-1]
    return {
        rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.M) if rule not in ("total", "all")
    }


def runs_of(output, rule):
    """Runs for which a dry run lists a job of the rule."""
    return set(re.findall(rf"^(?:local)?rule {rule}:.*?wildcards: ([^\n]*)", output, re.M | re.S))


def _arguments(arguments, directory, root):
    return ["-s", str(root / "Snakefile"), "--directory", str(directory), *map(str, arguments)]


def _environment(root, path):
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(root / "src"),  # the code that is fingerprinted and run, in a copy too
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
    }


def _become_snakemake(arguments, folder, environment, output):
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, environment["PYTHONPATH"])
    sys.argv = ["snakemake", *arguments]
    from snakemake.cli import main

    main()
