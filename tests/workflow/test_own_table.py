"""A table of one's own: an entry of comparisons.yaml or a notebook, and a row of artefacts.yaml."""

import re
import shutil

from gripmoe.io.files import read_yaml, write_yaml
from snakemake_runs import ROOT, snakemake


def test_a_table_of_ones_own_is_planned(tmp_path):
    root = tmp_path / "copy"
    for name in ("src", "workflow", "notebooks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("Snakefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    config, comparisons = root / "workflow" / "config", root / "src" / "gripmoe" / "reporting" / "comparisons.yaml"
    rows = {name: {"formats": ["csv", "md"]} for name in ("listed", "drawn", "neither")}
    write_yaml(config / "artefacts.yaml", read_yaml(config / "artefacts.yaml") | rows)
    write_yaml(comparisons, read_yaml(comparisons) | {"listed": read_yaml(comparisons)["erasure"]})
    shutil.copy(root / "notebooks" / "claims.ipynb", root / "notebooks" / "drawn.ipynb")

    def plan(**how):
        return snakemake("-n", "-p", "--config", "world=own", directory=tmp_path / "work", root=root, **how)

    write_yaml(config / "own.yaml", {"extends": "tiny", "artefacts": ["listed", "drawn"]})
    said = plan()
    for notebook, name in (("comparison", "listed"), ("drawn", "drawn")):
        assert re.search(rf"papermill \S*/{notebook}.ipynb \S*/{name}.ipynb", said) and f"{name}.md" in said
    assert "render_main_results" not in said
    write_yaml(config / "own.yaml", {"extends": "tiny", "artefacts": ["neither"]})
    assert "artefacts: 'neither' is no table of" in plan(check=False)
    (root / "notebooks" / "neither.ipynb").write_text("{}")
    assert "neither.ipynb: no notebook whose first cell is text (KeyError('cells'))" in plan(check=False)
