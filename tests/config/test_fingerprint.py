"""The fingerprint follows code that runs, name by name, and nothing else."""

import os
import shutil
import subprocess
import sys

import pytest

from edits import edit, reworded
from gripmoe.config import fingerprint

UNLEARN, REALIGN, MODEL = (
    f"gripmoe.cli.{name}" for name in ("unlearn:unlearn", "realign:realign", "prepare_model:prepare_model")
)
EVALUATE, DATA = "gripmoe.cli.evaluate:evaluate", "gripmoe.cli.prepare_data:prepare_data"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    folder = tmp_path / "src" / "gripmoe"
    shutil.copytree(fingerprint.SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fingerprint, "SOURCE", folder)
    forget_files()
    yield tmp_path, lambda entry=UNLEARN: fingerprint.code_fingerprint(entry)
    forget_files()


def forget_files():
    """As a new process, which reads every module again."""
    fingerprint._definitions.cache_clear()
    fingerprint._digests.cache_clear()


def test_comments_docstrings_and_formatting_do_not_count(copy):
    root, digest = copy
    before = [digest(entry) for entry in (UNLEARN, EVALUATE, "gripmoe.reporting.tables")]
    for file in (root / "src").rglob("*.py"):
        file.write_text(reworded(file.read_text()))
    forget_files()
    assert [digest(entry) for entry in (UNLEARN, EVALUATE, "gripmoe.reporting.tables")] == before


EDITS = [
    # what is edited, whom it affects, whom it does not
    ("gripmoe.training.objectives:GradientDifference.forget_loss", [UNLEARN], [REALIGN, MODEL, EVALUATE]),
    ("gripmoe.geometry.halfspace:nearest_feasible.max_rounds", [UNLEARN], [MODEL, EVALUATE]),
    ("gripmoe.geometry.realignment:realign_paper", [UNLEARN, REALIGN], [MODEL, EVALUATE]),
    ("gripmoe.cli.unlearn:unlearn", [UNLEARN], [REALIGN, MODEL]),
    ("gripmoe.cli.evaluate:evaluate", [EVALUATE], [UNLEARN]),
    ("gripmoe.data.corpora:TOKENS_PER_BATCH", [EVALUATE], [DATA]),
    ("gripmoe.moe.storage:load_model", [UNLEARN, EVALUATE], [DATA]),
    ("gripmoe.config.world:World", [], [UNLEARN, MODEL, EVALUATE]),
    ("gripmoe.config.methods:methods.yaml", ["gripmoe.config.methods"], [UNLEARN, MODEL, EVALUATE]),
    ("gripmoe.config.models:EmbeddedModel.attempts", [MODEL], [EVALUATE]),
    ("gripmoe.config.provenance:recorded", [], [UNLEARN, MODEL, EVALUATE]),
    ("gripmoe.reporting.tables:MISSING", ["gripmoe.reporting.comparison"], [UNLEARN, EVALUATE]),
    ("gripmoe.reporting.claims:claims.yaml", ["gripmoe.reporting.claims"], ["gripmoe.reporting.tables"]),
    ("gripmoe.reporting.comparison:comparisons.yaml", ["gripmoe.reporting.comparison"], ["gripmoe.reporting.tables"]),
]


@pytest.mark.parametrize(("place", "affected", "others"), EDITS, ids=[place for place, *_ in EDITS])
def test_an_edit_counts_where_it_runs(copy, place, affected, others):
    root, digest = copy
    before = {entry: digest(entry) for entry in (*affected, *others)}
    edit(root, place)
    forget_files()
    assert {entry for entry in before if digest(entry) != before[entry]} == set(affected)


@pytest.mark.parametrize(
    ("file", "affected"),
    [("worlds/shipped/tiny_a/card.json", MODEL), ("auditing/audits.yaml", "gripmoe.cli.audit:audit")],
)
def test_a_data_file_counts_in_the_folder_of_the_module_that_names_it(copy, file, affected):
    root, digest = copy
    before = digest(affected), digest(REALIGN)
    with (root / "src" / "gripmoe" / file).open("a") as data:
        data.write("\n")
    forget_files()
    assert digest(affected) != before[0] and digest(REALIGN) == before[1]


def test_another_model_of_the_package_repeats_no_run(copy):
    """Many steps name config.json and tokenizer.json of the models that they read."""
    root, digest = copy
    download = "gripmoe.cli.prepare_model:download"
    before = [digest(entry) for entry in (UNLEARN, REALIGN, EVALUATE, download)]
    another = root / "src" / "gripmoe" / "worlds" / "shipped" / "tiny_z"
    shutil.copytree(another.with_name("tiny_a"), another)
    forget_files()
    assert [digest(entry) for entry in (UNLEARN, REALIGN, EVALUATE, download)] == before


def test_another_training_of_embedded_models_repeats_no_published_one(copy):
    root, digest = copy
    download = "gripmoe.cli.prepare_model:download"
    before = digest(MODEL), digest(download)
    for name in ("base_model", "pretrain"):
        with (root / "src" / "gripmoe" / "training" / f"{name}.py").open("a") as source:
            source.write("\nprint(0)\n")
    forget_files()
    assert digest(MODEL) != before[0] and digest(download) == before[1]


def test_the_help_of_a_flag_does_not_count_and_its_default_does(copy):
    root, digest = copy
    before = digest()
    shared, own = (root / "src/gripmoe/cli" / name for name in ("options.py", "unlearn.py"))
    for file, said in (
        (shared, "the resolved configuration of the run"),
        (own, "GB of host memory for these outputs"),
    ):
        text = file.read_text()
        assert said in text
        file.write_text(text.replace(said, "other words"))
        forget_files()
        assert digest() == before
    edit(root, "gripmoe.cli.unlearn:unlearn.basis_memory")
    forget_files()
    assert digest() != before


def test_what_nothing_refers_to_does_not_count_and_what_runs_on_import_does(copy):
    root, digest = copy
    before = digest()
    with edit(root, "gripmoe.training.objectives").open("a") as source:
        forget_files()
        assert digest() == before
        source.write("\nUNUSED + 1\n")
    forget_files()
    assert digest() != before


@pytest.fixture
def digest_of(tmp_path, monkeypatch):
    """The fingerprint of one module's source."""
    folder = tmp_path / "gripmoe"
    folder.mkdir()
    monkeypatch.setattr(fingerprint, "SOURCE", folder)

    def digest(source):
        (folder / "sample.py").write_text(source, encoding="utf-8")
        forget_files()
        return fingerprint.code_fingerprint("gripmoe.sample")

    yield digest
    forget_files()


def test_what_is_empty_counts_where_it_says_something(digest_of):
    """Each expression is another."""
    values = ["", "None", "[]", "()", "''", "b''", "0", "0.0", "-0.0", "0j", "False", "...", "['']", "[None]", "*[]"]
    values += ["x=None", "x=[]", "x[:]", "x[None:]", "lambda: None", "lambda x: None", "lambda x=None: None"]
    values += ["lambda *, x: None", "lambda *, x=None: None", "{None: x}", "{**x}"]
    values += ["f''", "f'{x}'", "f'{x:}'", "f'{x!s}'", "f'{x: }'", "'{x}'"]
    digests = {digest_of(f"shown = f({value})\n") for value in values}
    assert len(digests) == len(values)


RECORDED = '''
"""A module."""

@dataclass(frozen=True)
class Thing(Base, metaclass=type):
    """A thing."""

    values: dict = field(default_factory=lambda *given, last=None, **named: [*given, last, named])


async def shown(a, /, b: int = 2**70, *, c=u"\\N{SNOWMAN}", **others) -> None:
    match a:
        case {"key": 1 | 2 as number, **rest} if number:
            return f"{a!r:>{b}} {c:} {b=} {{}}" f"{a:.{number}f}", rest, b"\\xff", 1e999
    return [x async for x in b if x[1:]]
'''


def test_every_python_takes_the_fingerprint_that_one_has_taken(digest_of):
    """Recorded by Python 3.11: what other versions must take, also where only one is installed."""
    assert digest_of(RECORDED) == "7dbd4db07e587309"


ALL = """
from gripmoe.config.fingerprint import SOURCE, code_fingerprint
for file in sorted(SOURCE.rglob("*.py")):
    module = ".".join(["gripmoe", *file.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
    print(module, code_fingerprint(module))
"""


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_another_python_takes_the_same_fingerprints_of_all_modules(version):
    environment = {**os.environ, "PYENV_VERSION": version, "PYTHONPATH": str(fingerprint.SOURCE.parent)}
    other = shutil.which(f"python{version}")
    if not other or subprocess.run([other, "--version"], env=environment, capture_output=True, check=False).returncode:
        pytest.skip(f"not run: no Python {version} here")
    said = [
        subprocess.run([python, "-c", ALL], env=environment, capture_output=True, text=True, check=True).stdout
        for python in (sys.executable, other)
    ]
    assert said[0] == said[1] and len(said[0].splitlines()) > 50


def test_an_entry_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no code 'gripmoe.cli.unlearn:unlern'"):
        fingerprint.code_fingerprint("gripmoe.cli.unlearn:unlern")
