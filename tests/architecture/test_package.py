"""What the built package holds, and that its public names have types."""

import inspect
import shutil
import subprocess
import sys
import typing
import zipfile
from pathlib import Path

import pytest

import gripmoe

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
    hints = typing.get_type_hints(inspect.unwrap(function))
    assert {*inspect.signature(function).parameters, "return"} <= hints.keys()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'constrian'"):
        gripmoe.constrian  # noqa: B018
