"""Public modules say what they are, and are short. `make lint` checks what they import."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src" / "gripmoe").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_modules_and_public_functions_are_documented(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not tree.body:
        return
    assert ast.get_docstring(tree), "module docstring"
    short = 3  # statements: what takes no more explains itself
    undocumented = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and len(list(ast.walk(node))) > 40 * short
    ]
    assert not undocumented


def test_no_file_has_two_rooms():
    long = {str(path.relative_to(ROOT)): n for path in MODULES if (n := len(path.read_text().splitlines())) > 400}
    assert not long
