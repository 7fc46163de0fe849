"""A table of one's own: a notebook and a row of artefacts.yaml."""

import shutil

from gripmoe.io.files import read_yaml, write_yaml
from snakemake_runs import ROOT, snakemake


def test_a_table_of_ones_own_is_planned(tmp_path):
    root = tmp_path / "copy"
    for name in ("src", "workflow", "notebooks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("Snakefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    shutil.copy(root / "notebooks" / "main_results.ipynb", root / "notebooks" / "mine.ipynb")
    config = root / "workflow" / "config"
    write_yaml(config / "artefacts.yaml", read_yaml(config / "artefacts.yaml") | {"mine": {"formats": ["csv", "md"]}})
    write_yaml(config / "own.yaml", {"extends": "tiny", "artefacts": ["mine"]})
    plan = snakemake("-n", "--config", "world=own", directory=tmp_path / "work", root=root)
    assert "render_mine" in plan and "mine.md" in plan and "render_main_results" not in plan
