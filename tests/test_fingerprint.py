"""The fingerprint follows code that runs, name by name, and nothing else."""

import shutil

import pytest

from gripmoe import fingerprint

UNLEARN, REALIGN, MODEL = (
    f"gripmoe.commands.{name}" for name in ("unlearn:unlearn", "unlearn:realign", "prepare:prepare_model")
)
EVALUATE, DATA = "gripmoe.commands.evaluate:evaluate", "gripmoe.commands.prepare:prepare_data"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    folder = tmp_path / "gripmoe"
    shutil.copytree(fingerprint.SOURCE, folder)
    monkeypatch.setattr(fingerprint, "SOURCE", folder)

    def digest(entry=UNLEARN):
        fingerprint._definitions.cache_clear()
        return fingerprint.code_fingerprint(entry)

    yield folder, digest
    fingerprint._definitions.cache_clear()


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_comments_docstrings_and_formatting_do_not_count(copy):
    folder, digest = copy
    before = digest()
    replace(folder / "objectives.py", '"""The unlearning objectives', '"""Objectives')
    replace(folder / "objectives.py", "import torch\n", "# a remark\nimport torch\n\n\n")
    replace(folder / "objectives.py", '    """The objective of a run', '    """An objective')
    assert digest() == before


EDITS = [
    # file, from, to, whom it affects, whom it does not
    ("objectives.py", "return -cross_entropy(", "return -2 * cross_entropy(", [UNLEARN], [REALIGN, MODEL, EVALUATE]),
    ("geometry/halfspace.py", "max_rounds: int = 50", "max_rounds: int = 51", [UNLEARN], [MODEL, EVALUATE]),
    ("geometry/realignment.py", "torch.linalg", "1.0 * torch.linalg", [UNLEARN, REALIGN], [MODEL, EVALUATE]),
    ("commands/unlearn.py", "corpora.retain[: run", "corpora.retain[1 : run", [UNLEARN], [REALIGN, MODEL]),
    ("commands/evaluate.py", "prefix in (", "prefix in 1 * (", [EVALUATE], [UNLEARN]),
    ("data/corpora.py", "TOKENS_PER_BATCH = ", "TOKENS_PER_BATCH = 1 + ", [EVALUATE], [DATA]),
    ("moe/storage.py", "def load_model(", "def load_model(unused=1, *, ", [UNLEARN, EVALUATE], [DATA]),
    ("config.py", "class World(Strict):", "class World(Strict):\n    unused: int = 0", [], [UNLEARN, MODEL, EVALUATE]),
    ("catalogue.py", "attempts: PositiveInt = 3", "attempts: PositiveInt = 4", [MODEL], [EVALUATE]),
    ("provenance.py", "round(peak_kib", "abs(peak_kib", [], [UNLEARN, MODEL, EVALUATE]),
    ("reporting/tables.py", "MISSING = ", "MISSING = '' + ", ["gripmoe.reporting.comparison"], [UNLEARN, EVALUATE]),
    ("reporting/claims.yaml", "Method A", "Method a", ["gripmoe.reporting.claims"], ["gripmoe.reporting.tables"]),
    ("reporting/comparisons.yaml", "0.26", "0.27", ["gripmoe.reporting.comparison"], ["gripmoe.reporting.tables"]),
]


@pytest.mark.parametrize(("file", "old", "new", "affected", "others"), EDITS)
def test_an_edit_counts_where_it_runs(copy, file, old, new, affected, others):
    folder, digest = copy
    before = {entry: digest(entry) for entry in (*affected, *others)}
    replace(folder / file, old, new)
    assert {entry for entry in before if digest(entry) != before[entry]} == set(affected)


def test_what_nothing_refers_to_does_not_count_and_what_runs_on_import_does(copy):
    folder, digest = copy
    before = digest()
    with (folder / "objectives.py").open("a") as source:
        source.write("\nUNUSED = 1\n")
    assert digest() == before
    with (folder / "objectives.py").open("a") as source:
        source.write("\nOBJECTIVES.clear()\n")
    assert digest() != before


def test_an_entry_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no code 'gripmoe.commands.unlearn:unlern'"):
        fingerprint.code_fingerprint("gripmoe.commands.unlearn:unlern")
