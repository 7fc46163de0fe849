"""The examples run as they stand, and do what they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "notebooks" / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    output = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True).stdout
    *others, kept = map(float, re.findall(r": (0\.\d+|1\.0+)\n", output))
    if "anchored" in path.stem:
        assert kept > 0.9 and all(kept > other + 0.2 for other in others)
    else:
        assert kept == 1.0
