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
    statements = _without_docstrings(ast.parse(_file(module).read_text(encoding="utf-8")).body)
    imported = {
        name: target for node in statements if isinstance(node, ast.ImportFrom) for name, target in _imports(node)
    }
    nodes: dict[str, list[ast.stmt]] = {LOOSE: []}
    for node in statements:
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
            for name in _names(node) or [LOOSE]:
                nodes.setdefault(name, []).append(node)
    definitions = {name: Definition(references=(target,)) for name, target in imported.items()}
    for name, defining in nodes.items():
        seen = [Statement(node) for node in defining]
        references = [each for statement in seen for each in statement.references(module, imported, nodes.keys())]
        data = [digest for statement in seen for digest in statement.data(_file(module).parent)]
        code = "\n".join([*(statement.text for statement in seen), *data])
        definitions[name] = Definition(code, tuple(references))
    return definitions


class Statement:
    """A top-level statement: its text, the same under every version of Python (which that of `ast.dump` is not), and
    the nodes in it that may refer to something."""

    def __init__(self, node: ast.stmt):
        self.nodes: dict[type, list] = {kind: [] for kind in (ast.ImportFrom, ast.Attribute, ast.Name, ast.Constant)}
        self.text = self._text(node)

    def _text(self, node) -> str:
        if isinstance(node, list):
            return f"[{', '.join(map(self._text, node))}]"
        if not isinstance(node, ast.AST):
            return ascii(node)  # repr escapes what the version's Unicode tables do not know
        kind = type(node)
        if kind in self.nodes:
            self.nodes[kind].append(node)
        # A newer version's fields are empty where its syntax is not used.
        said = ", ".join(
            [f"{name}={self._text(value)}" for name, value in _fields(node) if value is not None and value != []]
        )
        return f"{kind.__name__}({said})"

    def references(self, module: str, imported: dict[str, Reference], own) -> Iterator[Reference]:
        """What the statement refers to, by import or as "module:name" in a string."""
        local = imported | {name: target for node in self.nodes[ast.ImportFrom] for name, target in _imports(node)}
        taken = set()
        for node in self.nodes[ast.Attribute]:
            target = local.get(node.value.id) if isinstance(node.value, ast.Name) else None
            if target and target[1] is None:  # of a module only what is taken
                taken.add(node.value)
                yield target[0], node.attr
        for node in self.nodes[ast.Name]:
            if node in taken:
                continue
            if node.id in local:
                yield local[node.id]
            elif node.id in own:
                yield module, node.id
        for text in self._strings():
            if NAMED.fullmatch(text):
                yield tuple(text.split(":"))

    def data(self, folder: Path) -> list[str]:
        """The digests of data files that it names, which lie in the module's folder or below it."""
        return [digest for text in self._strings() if text.endswith(DATA) for digest in _digests(folder, text)]

    def _strings(self) -> list[str]:
        return [node.value for node in self.nodes[ast.Constant] if isinstance(node.value, str)]


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    """The fields of a node that count: without docstrings and annotations, which hold the help of a command's flags."""
    left_out = LEFT_OUT.get(type(node))
    for name, value in ast.iter_fields(node):
        if name == left_out:
            continue
        if name == "body" and isinstance(value, list):
            value = _without_docstrings(value)
        elif name == "values" and isinstance(node, ast.JoinedStr):  # Python 3.12 ends formats in empty strings
            value = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
        yield name, value


LEFT_OUT = {
    ast.arg: "annotation",
    ast.FunctionDef: "returns",
    ast.AsyncFunctionDef: "returns",
    ast.Constant: "kind",  # the u of u"text"
}


def _without_docstrings(body: list[ast.stmt]) -> list[ast.stmt]:
    return [statement for statement in body if not _is_docstring(statement)] or [ast.Pass()]


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


@functools.cache
def _digests(folder: Path, name: str) -> tuple[str, ...]:
    files = sorted(folder.rglob(name)) if re.fullmatch(r"[\w.]+", name) else []
    return tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
