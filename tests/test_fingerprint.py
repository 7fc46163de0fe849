"""The fingerprint follows code that runs, through imports, and nothing else."""

import shutil

import pytest

from gripmoe import fingerprint


@pytest.fixture
def copy(tmp_path, monkeypatch):
    folder = tmp_path / "gripmoe"
    shutil.copytree(fingerprint.SOURCE, folder)
    monkeypatch.setattr(fingerprint, "SOURCE", folder)

    def digest(module="gripmoe.unlearning"):
        fingerprint._parsed.cache_clear()
        return fingerprint.code_fingerprint(module)

    yield folder, digest
    fingerprint._parsed.cache_clear()


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_comments_docstrings_and_formatting_do_not_count(copy):
    folder, digest = copy
    before = digest()
    replace(folder / "objectives.py", '"""The unlearning objectives', '"""Objectives')
    replace(folder / "objectives.py", "import torch\n", "# a remark\nimport torch\n\n\n")
    assert digest() == before


@pytest.mark.parametrize("file", ["objectives.py", "geometry/halfspace.py", "data/documents.py"])
def test_an_edit_anywhere_in_the_closure_counts(copy, file):
    folder, digest = copy
    before = digest()
    with (folder / file).open("a") as source:
        source.write("\nADDED = 1\n")
    assert digest() != before


def test_an_edit_elsewhere_does_not_count(copy):
    folder, digest = copy
    before = digest()
    with (folder / "reporting" / "tables.py").open("a") as source:
        source.write("\nADDED = 1\n")
    assert digest() == before
    assert digest("gripmoe.reporting.tables") != before
