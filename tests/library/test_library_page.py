"""Every Python block of docs/library.md runs as pasted, after the first one."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
SETUP, *BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
METHODS = re.findall(r"^\| (`.+?) \|", PAGE.split("## Methods")[1].split("\n## ")[0], flags=re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:40])
def test_a_block_runs_as_pasted(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(SETUP + block, "docs/library.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("method", re.findall("`([a-z_0-9]+)`", " ".join(METHODS[1:])))
def test_the_loop_with_all_marks_serves_every_method_of_the_page(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in BLOCKS if "handle.refit" in block)
    assert 'method="anchored"' in block
    exec(compile(SETUP + block.replace('"anchored"', f'"{method}"'), "docs/library.md", "exec"), {})
