"""Public modules say what they are, and are short. `make lint` checks what they import."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src" / "gripmoe").rglob("*.py"))


def test_modules_and_public_functions_are_documented():
    short = 3  # statements: what takes no more explains itself
    undocumented = []
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and len(list(ast.walk(node))) > 40 * short
        ]
        where = path.relative_to(ROOT / "src")
        undocumented += [f"{where}: {node.name}" for node in public if not ast.get_docstring(node)]
        if tree.body and not ast.get_docstring(tree):
            undocumented.append(f"{where}: the module")
    assert MODULES
    assert not undocumented


def test_no_file_has_two_rooms():
    long = {str(path.relative_to(ROOT)): n for path in MODULES if (n := len(path.read_text().splitlines())) > 400}
    assert not long
