"""Edits of code and of settings that tests name by symbol, so that they quote no line of either."""

import ast
import json
from pathlib import Path

import yaml


def edit(root: Path, place: str, value=None) -> Path:
    """Edits a checkout in `root` and returns the file: "gripmoe.moe.storage:load_model" or "gripmoe.config.world:World"
    get a statement more, "gripmoe.reporting.names:FORGOTTEN" (or a parameter, named after its function) a value that
    another expression gives, "gripmoe.training.objectives" a name that nothing uses,
    "gripmoe.reporting.claims:claims.yaml" beside that module a key more, a notebook a word more;
    "folder/settings.yaml:key.subkey" becomes `value`."""
    file, name = file_of(root, place), place.partition(":")[2]
    text = file.read_text(encoding="utf-8")
    if name.endswith(".yaml"):
        text = _set(text, ["unused"], 0)
    elif file.suffix == ".yaml":
        text = _set(text, name.split("."), value)
    elif file.suffix == ".ipynb":
        text = _with_a_word_more(text)
    else:
        text = _edited(text, name.split(".")) if name else f"{text}\n\nUNUSED = 1\n"
    file.write_text(text, encoding="utf-8")
    return file


def file_of(root: Path, place: str) -> Path:
    where, _, name = place.partition(":")
    if "/" in where:
        return root / where
    module = root.joinpath("src", *where.split("."))
    module = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return module.with_name(name) if name.endswith(".yaml") else module


def reworded(text: str) -> str:
    """The same code with another docstring everywhere, another formatting and other comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                node.body.pop(0)
            node.body.insert(0, ast.Expr(ast.Constant("Other words.")))
    return f"# a remark\n{ast.unparse(tree)}\n"


def _edited(text: str, names: list[str]) -> str:
    node = ast.parse(text)
    for name in names:
        node = _named(node, name)
    lines = text.encode().splitlines(keepends=True)  # columns count bytes
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        lines.insert(node.end_lineno, b" " * node.body[-1].col_offset + b"unused: int = 0\n")
    else:
        for line, column, bracket in (
            (node.end_lineno, node.end_col_offset, b"][0]"),
            (node.lineno, node.col_offset, b"["),
        ):
            lines[line - 1] = lines[line - 1][:column] + bracket + lines[line - 1][column:]
    return b"".join(lines).decode()


def _named(node: ast.AST, name: str) -> ast.AST:
    """What a module, a class or a function has under a name: a definition, a value or the default of a parameter."""
    if isinstance(node, ast.FunctionDef):
        given, positional = node.args, [*node.args.posonlyargs, *node.args.args]
        defaults = [
            *zip(reversed(positional), reversed(given.defaults), strict=False),
            *zip(given.kwonlyargs, given.kw_defaults, strict=True),
        ]
        for argument, default in defaults:
            if argument.arg == name and default:
                return default
    for statement in node.body:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if getattr(statement, "name", None) == name:
            return statement
        if statement.__class__ in (ast.Assign, ast.AnnAssign) and name in [getattr(t, "id", None) for t in targets]:
            return statement.value
    raise LookupError(f"no {name} in {getattr(node, 'name', 'the module')}")


def _set(text: str, keys: list[str], value) -> str:
    content = inner = yaml.safe_load(text)
    for key in keys[:-1]:
        inner = inner[key]
    assert inner.get(keys[-1]) != value
    inner[keys[-1]] = value
    return yaml.safe_dump(content, sort_keys=False)


def _with_a_word_more(text: str) -> str:
    notebook = json.loads(text)
    notebook["cells"][0]["source"].append(" More.")
    return json.dumps(notebook)
