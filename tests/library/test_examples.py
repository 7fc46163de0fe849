"""The examples run as they stand, and do what they print; without the constraint they do not."""

import re
import runpy
from pathlib import Path

import pytest

from gripmoe.constraints.base import Unconstrained
from gripmoe.constraints.build import Built
from gripmoe.library import constrain

EXAMPLES = sorted((Path(__file__).parents[2] / "notebooks" / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path, monkeypatch, capsys):
    def printed():
        runpy.run_path(str(path), run_name="__main__")
        return [float(number) for number in re.findall(r": (0\.\d+|1\.0+)\n", capsys.readouterr().out)]

    monkeypatch.chdir(tmp_path)
    *others, kept = printed()
    monkeypatch.setattr(constrain, "build", lambda *_, **__: Built(Unconstrained(), scope=None))
    others += printed()
    if "anchored" in path.stem:
        assert kept > 0.9 and all(kept > other + 0.2 for other in others)
    else:
        assert kept == 1.0 > max(others)
