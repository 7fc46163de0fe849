"""A digest of the code that a function runs, followed name by name through the package.

Docstrings, comments, formatting, annotations of parameters and unused names do not count; data files that the code
names do. Modules are read, never imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1]
PACKAGE = SOURCE.name
WITHOUT_EFFECT = {f"{PACKAGE}.config.provenance", f"{PACKAGE}.config.fingerprint"}  # on what a step computes
DATA = (".yaml", ".json", ".jinja")
NAMED = re.compile(rf"{PACKAGE}(\.\w+)+:\w+")  # code that is imported by its name: an entry of a registry
LOOSE = ""  # statements of a module that define nothing: they run whatever is imported from it
Reference = tuple[str, str | None]  # a module and a name in it; None for all of the module


def code_fingerprint(*entries: str) -> str:
    """Digest of all that the entries run: "gripmoe.training.loop" for a whole module, "gripmoe.cli.unlearn:unlearn"
    for one function of it. Raises ValueError for an entry that is not there."""
    used: dict[Reference, str] = {}
    pending: list[Reference] = []
    for entry in entries:
        module, _, name = entry.partition(":")
        if not _file(module).exists() or (name and name not in _definitions(module)):
            raise ValueError(f"no code {entry!r} to take a fingerprint of")
        pending.append((module, name or None))
    while pending:
        module, name = pending.pop()
        if module in WITHOUT_EFFECT:
            continue
        definitions = _definitions(module)
        for each in definitions if name is None else {name, LOOSE} & definitions.keys():
            if (module, each) not in used:
                used[module, each] = definitions[each].code
                pending += definitions[each].references
    digest = hashlib.sha256()
    for (module, name), code in sorted(used.items()):
        digest.update(f"{module}:{name}\n{code}\n".encode())
    return digest.hexdigest()[:16]


@functools.cache
def fingerprint_now(entry: str) -> str | None:
    """The fingerprint of an entry that a record names, taken once; None if it is there no more."""
    try:
        return code_fingerprint(entry)
    except ValueError:
        return None


@dataclass
class Definition:
    """A top-level name of a module: its normalised code, and what that refers to."""

    code: str = ""
    references: tuple[Reference, ...] = ()


def _file(module: str) -> Path:
    path = SOURCE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _definitions(module: str) -> dict[str, Definition]:
    tree = ast.parse(_file(module).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [statement for statement in body if not _is_docstring(statement)] or [ast.Pass()]
        if isinstance(node, ast.arg):
            node.annotation = None  # of a command it holds the help of a flag
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    imported = {
        name: target for node in tree.body if isinstance(node, ast.ImportFrom) for name, target in _imports(node)
    }
    nodes: dict[str, list[ast.stmt]] = {LOOSE: []}
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
            for name in _names(node) or [LOOSE]:
                nodes.setdefault(name, []).append(node)
    definitions = {name: Definition(references=(target,)) for name, target in imported.items()}
    for name, statements in nodes.items():
        parts = [part for statement in statements for part in _parts(module, statement, imported, nodes.keys())]
        code = "\n".join([*map(_normal, statements), *(part for part in parts if isinstance(part, str))])
        definitions[name] = Definition(code, tuple(part for part in parts if not isinstance(part, str)))
    return definitions


def _normal(node) -> str:
    """A syntax tree as text that is the same under every version of Python, which the text of `ast.dump` is not."""
    if isinstance(node, list):
        return f"[{', '.join(map(_normal, node))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)  # repr escapes what the version's Unicode tables do not know
    fields = {name: value for name, value in ast.iter_fields(node) if name != "kind"}  # the u of u"text"
    if isinstance(node, ast.JoinedStr):  # Python 3.12 ends format specifications in empty strings
        fields["values"] = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
    # A newer version's fields are empty where its syntax is not used.
    said = ", ".join(f"{name}={_normal(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(node).__name__}({said})"


def _names(node: ast.stmt) -> list[str]:
    """What a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]


def _imports(node: ast.ImportFrom) -> Iterator[tuple[str, Reference]]:
    """The package's own things that a statement imports: local name, and what it stands for."""
    if node.module and node.module.split(".")[0] == PACKAGE:
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            target = (submodule, None) if _file(submodule).exists() else (node.module, alias.name)
            yield alias.asname or alias.name, target


def _parts(module: str, statement: ast.stmt, imported: dict[str, Reference], own) -> Iterator[Reference | str]:
    """References of a statement, by import or as "module:name" in a string, and the digests of data files named."""
    local = dict(imported)
    attributes = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.ImportFrom):
            local |= _imports(node)
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            target = local.get(node.value.id)
            if target and target[1] is None:  # of a module only what is taken
                attributes.add(node.value)
                yield target[0], node.attr
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node not in attributes:
            if node.id in local:
                yield local[node.id]
            elif node.id in own:
                yield module, node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            yield tuple(node.value.split(":"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(DATA):
            yield from _digests(node.value)


@functools.cache
def _digests(name: str) -> tuple[str, ...]:
    """Of the package's data files of that name, wherever they lie."""
    files = sorted(SOURCE.rglob(name)) if re.fullmatch(r"[\w.]+", name) else []
    return tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
