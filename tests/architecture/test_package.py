"""What the built package holds, and that its public names have types."""

import ast
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
import typing
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import gripmoe
from gripmoe.auditing.report import AuditReport
from gripmoe.constraints.hooks import ConstraintHandle
from gripmoe.geometry.realignment import Realignment
from gripmoe.io.imports import EXTRAS
from gripmoe.library.realign import Original

ROOT = Path(__file__).parents[2]


def test_the_built_package_is_marked_as_typed_and_has_its_data(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    built = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    data = {p for p in (ROOT / "src").rglob("*") if p.suffix in {".yaml", ".typed"} and "egg-info" not in str(p)}
    assert {str(path.relative_to(ROOT / "src")) for path in data} <= built
    assert "gripmoe/py.typed" in built


@pytest.mark.parametrize("name", [name for name in gripmoe.__all__ if name.islower()])
def test_public_names_have_types(name):
    function = getattr(gripmoe, name)
    late = {"AuditReport": AuditReport} if name == "audit" else {}  # it needs pandas, an extra
    hints = typing.get_type_hints(inspect.unwrap(function), localns=late)
    assert {*inspect.signature(function).parameters, "return"} <= hints.keys()


PUBLIC = [*(getattr(gripmoe, name) for name in gripmoe.__all__), ConstraintHandle, Original, Realignment]
MARKS = [method for name, method in vars(ConstraintHandle).items() if not name.startswith("_") and callable(method)]


def errors_of(thing) -> set[str]:
    """What its code raises, and that of its module which it refers to."""
    module = ast.parse(inspect.getsource(inspect.getmodule(inspect.unwrap(thing))))
    defined = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    used, errors = [inspect.unwrap(thing).__name__], set()
    for name in used:
        for node in (inner for outer in defined if outer.name == name for inner in ast.walk(outer)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                errors.add(ast.unparse(node.exc.func))
            other = getattr(node, "id", getattr(node, "attr", None))
            if other not in used and other in [each.name for each in defined]:
                used.append(other)
    return errors


@pytest.mark.parametrize("thing", [*PUBLIC, *MARKS], ids=lambda thing: thing.__qualname__)
def test_help_names_the_anchor_and_every_error(thing):
    """Where in the paper it stands, or that it is ours; and what is raised here, as far as the module itself does."""
    said = inspect.getdoc(thing)
    assert thing in MARKS or re.search(r"Sec\.|Eq\.|App\.|Algorithm|\bours\b", said)
    for error in errors_of(thing):
        assert "aises" in said and error in said, error


def test_every_imported_package_is_declared():
    """What another package happens to bring may go with its next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(line for name in ("eval", "report", "gpu", "fp8") for line in extras[name])]
    declared = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in listed}
    of_module = metadata.packages_distributions()
    undeclared = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for module in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"gripmoe"}:
                providers = {name.lower().replace("_", "-") for name in of_module.get(module, [module])}
                if not providers & declared:
                    undeclared[module] = path.name
    assert not undeclared


def test_what_is_imported_beyond_the_library_belongs_to_an_extra_that_errors_name():
    """And an extra has no more than that. torchao and TransformerEngine have errors of their own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = {re.match(r"[\w.-]+", line)[0].lower() for line in project["dependencies"]}
    of_module = metadata.packages_distributions()
    beyond = {
        module
        for path in (ROOT / "src").rglob("*.py")
        for module in re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if module in of_module and not {name.lower().replace("_", "-") for name in of_module[module]} & brought
    }
    assert beyond - {"gripmoe", "torchao", "transformer_engine"} == set().union(*EXTRAS.values())


def test_the_version_is_one():
    """Of the package, the citation, and the newest release in the changelog, which says what was renamed."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version == gripmoe.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    _, *entries = (ROOT / "CHANGELOG.md").read_text().split("\n## ")
    newest = next(entry for entry in entries if not entry.startswith("[Unreleased]"))
    assert newest.startswith(f"[{version}]") and "### Migration" in newest


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'constrian'"):
        gripmoe.constrian  # noqa: B018
