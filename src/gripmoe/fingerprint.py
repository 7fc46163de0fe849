"""A digest of the code that a module really runs: its static import closure within the package.

Docstrings, comments and formatting do not count. Modules are read, never imported, so the Snakefile may call this.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

SOURCE = Path(__file__).parent
PACKAGE = SOURCE.name


def code_fingerprint(*modules: str) -> str:
    """Digest of the modules (dotted, for example "gripmoe.unlearning") and all they import, directly or not."""
    closure: set[str] = set()
    pending = list(modules)
    while pending:
        module = pending.pop()
        if module not in closure:
            closure.add(module)
            pending += _parsed(module)[1]
    digest = hashlib.sha256()
    for module in sorted(closure):
        digest.update(f"{module}\n{_parsed(module)[0]}\n".encode())
    return digest.hexdigest()[:16]


def _file(module: str) -> Path:
    path = SOURCE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _parsed(module: str) -> tuple[str, tuple[str, ...]]:
    """Normalised code of a module and the package's modules that it imports anywhere, functions included."""
    tree = ast.parse(_file(module).read_text(encoding="utf-8"))
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
            imported.update(f"{node.module}.{alias.name}" for alias in node.names)
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            body[0] = ast.Pass()
    # A package's __init__ is lazy about its public names; importing a submodule does not run what they need.
    inside = (name for name in imported if name.startswith(f"{PACKAGE}."))
    return ast.dump(tree), tuple(sorted(name for name in inside if _file(name).exists()))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
