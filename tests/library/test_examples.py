"""The examples run as they stand, and do what they print; without the constraint they do not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "notebooks" / "examples").glob("*.py"))
WITHOUT = """
import runpy, sys
import gripmoe.library.constrain
from gripmoe.constraints.base import Unconstrained
from gripmoe.constraints.build import Built
gripmoe.library.constrain.build = lambda *_, **__: Built(Unconstrained(), scope=None)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def printed(*arguments):
    output = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout
    return [float(number) for number in re.findall(r": (0\.\d+|1\.0+)\n", output)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    *others, kept = printed(path)
    others += printed("-c", WITHOUT, path)
    if "anchored" in path.stem:
        assert kept > 0.9 and all(kept > other + 0.2 for other in others)
    else:
        assert kept == 1.0 > max(others)
