"""The catalogues of a configuration folder, which say what the names in its worlds mean."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from pathlib import Path
from typing import Literal

from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.methods import TABLE, Method, method_table
from gripmoe.config.models import ModelConfig
from gripmoe.config.reading import read_catalogue, require_known
from gripmoe.config.training import OBJECTIVES, OwnObjective
from gripmoe.config.world import NO_OBJECTIVE, Artefact, OwnClass
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest

CATALOGUES = ("models", "benchmarks", "objectives", "methods", "artefacts")


class Catalogues:
    """models.yaml, benchmarks.yaml and artefacts.yaml of a folder; and the package's methods and objectives, with those
    that methods.yaml and objectives.yaml of the folder add. Raises ConfigError at the first mistake."""

    def __init__(self, folder: Path):
        self.models_file, self.methods_file, own = (folder / f"{n}.yaml" for n in ("models", "methods", "objectives"))
        self.models = read_catalogue(self.models_file, ModelConfig)
        self.benchmarks = read_catalogue(folder / "benchmarks.yaml", Benchmark)
        self.artefacts = read_catalogue(folder / "artefacts.yaml", Artefact)
        added = read_catalogue(self.methods_file, Method) if self.methods_file.exists() else {}
        self.methods = joined(method_table(), added, f"{TABLE} has a method", self.methods_file)
        for name, method in added.items():
            if method.corrects:
                require_known(method.corrects, self.methods, f"{self.methods_file}: {name}.corrects")
        self.own_constraints = {
            name: _own_class(path, f"{self.methods_file}: {name}.constraint")
            for name, method in added.items()
            if (path := method.own_constraint)
        }
        rows = read_catalogue(own, OwnObjective) if own.exists() else {}
        if NO_OBJECTIVE in rows:
            raise ConfigError(f"{own}: {NO_OBJECTIVE}: this name stands for no objective; give yours another")
        self.own_objectives = {name: _own_class(row.path, f"{own}: {name}.class") for name, row in rows.items()}
        registered = {name: row.registered() for name, row in rows.items()}
        self.objectives = joined(OBJECTIVES, registered, "gripmoe has an objective", own)


def joined(table: dict, added: dict, taken: str, where: Path | str) -> dict:
    """The rows of a table and those that a configuration adds, which need other names."""
    for name in added.keys() & table.keys():
        raise ConfigError(f"{where}: {name}: {taken} of this name; give yours another")
    return {**table, **added}


def own_code(benchmark: Benchmark, key: Literal["attacks", "metrics"]) -> list[str]:
    """Digests of the files of a benchmark's own attacks or metrics. Raises ConfigError if a file is not found."""
    paths = getattr(benchmark, key)
    return [_module_digest(path, f"benchmarks.yaml: {key}.{name}") for name, path in paths.items()]


def _own_class(path: str, where: str) -> OwnClass:
    return OwnClass(path=path, sha256=_module_digest(path, where))


def _module_digest(path: str, where: str) -> str:
    """The digest of the file that defines a class or function, "module:name". The module is not
    imported; packages above it are. Raises ConfigError, naming `where`, if the file is not found or lacks the name."""
    module, _, name = path.partition(":")
    try:
        spec = None if module == "__main__" else importlib.util.find_spec(module)  # a job has another `__main__`
    except (ModuleNotFoundError, ValueError):  # of a package above it; of a module made by hand
        spec = None
    if spec is None or not spec.has_location:
        raise ConfigError(f"{where}: no module {module!r} in the folders of PYTHONPATH; add the one that it lies in")
    file = Path(spec.origin)
    if file.suffix == ".py" and not {name, "*", "__getattr__"} & (known := _names_in(file)):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "name what it defines"
        raise ConfigError(f"{where}: {file} has no {name!r}; {hint}")
    return file_digest(file)


def _names_in(file: Path) -> set[str]:
    """All names that occur in a module, and "*" if it imports all of another. Raises ConfigError for a syntax error."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except SyntaxError as error:
        raise ConfigError(f"{file}, line {error.lineno}: {error.msg}") from None
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    return defined | imported | {node.id for node in nodes if isinstance(node, ast.Name)}
