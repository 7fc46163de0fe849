"""What the reference says, from the code that it is about: public names, commands, keys of configuration, tables."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import yaml

import gripmoe
from gripmoe.cli.main import COMMANDS, load
from gripmoe.config import benchmarks, methods, models, training, types, world
from gripmoe.reporting.specifications import description, notebook_of

DOCS = Path(__file__).parent
ROOT = DOCS.parent
NOTEBOOKS = ROOT / "notebooks"
RETURNED = (  # by public functions, or given to functions of your own
    "gripmoe.constraints.hooks.ConstraintHandle",
    "gripmoe.auditing.report.AuditReport",
    "gripmoe.library.realign.Original",
    "gripmoe.geometry.realignment.Realignment",
    "gripmoe.config.methods.Method",
    "gripmoe.constraints.base.RouterConstraint",
    "gripmoe.constraints.base.MarkedPass",
    "gripmoe.constraints.base.Tokens",
    "gripmoe.geometry.routing.LayerRouting",
    "gripmoe.data.documents.Batch",
    "gripmoe.moe.MoEModel",
    "gripmoe.training.objectives.Objective",
    "gripmoe.attacks.base.Setting",
    "gripmoe.attacks.base.QuestionSetting",
    "gripmoe.attacks.base.Found",
)
FILES: dict[str, tuple[type[types.Strict], ...]] = {  # the first stands at the top level of a file, or of a row of it
    "A world: `workflow/config/NAME.yaml`": (
        world.World,
        training.Training,
        training.RetainWeight,
        training.PreferenceSettings,
        training.RepresentationSettings,
        training.Relearning,
    ),
    "A method: a row of `methods.yaml`": (methods.Method, methods.EpsNullConfig, methods.UndoConfig),
    "A model: a row of `models.yaml`": (
        models.EmbeddedModel,
        models.EmbeddedSize,
        models.PublishedModel,
        models.FinetunedModel,
    ),
    "A benchmark: a row of `benchmarks.yaml`": (
        benchmarks.Benchmark,
        benchmarks.EmbeddedData,
        benchmarks.PublishedData,
        benchmarks.PublishedNews,
    ),
    "An objective of your own: a row of `objectives.yaml`": (training.OwnObjective,),
    "A table or figure: a row of `artefacts.yaml`": (world.Artefact,),
}
SHOWN = {shown.__name__ for each in FILES.values() for shown in each}


def public_names() -> str:
    """The public face, in the order of `gripmoe.__all__`."""
    return "\n".join(_autodoc(f"gripmoe.{name}", getattr(gripmoe, name)) for name in gripmoe.__all__)


def returned_objects() -> str:
    return "\n".join(_autodoc(path, resolve_name(path)) for path in RETURNED)


def _autodoc(path: str, thing: Any) -> str:
    kind = "autoclass" if inspect.isclass(thing) else "autofunction"
    # the fields of a configuration stand in another page
    members = ":members:" if kind == "autoclass" and not issubclass(thing, types.Strict) else ""
    return f"```{{eval-rst}}\n.. {kind}:: {path}\n   {members}\n```\n"


def commands() -> str:
    """Every command with its options, its help and its example."""
    return "\n".join(
        f"## {panel}\n\n" + "\n".join(_command(name) for name in listed) for panel, listed in COMMANDS.items()
    )


def _command(name: str) -> str:
    command = load(name)
    said, _, example = command.help.partition("Example:")
    context = command.context_class(command, info_name=f"gripmoe {name}")
    usage = " ".join([f"gripmoe {name}", *command.collect_usage_pieces(context)])
    options = []
    for parameter in command.params:
        shown, text = parameter.get_help_record(context) or (parameter.name.upper(), parameter.help)
        text, _, note = text.partition("  [")
        note = f" ({note[:-1].replace('default: ', 'default ')})" if note else ""
        options.append(f"- `{shown}`{_escaped(note)}: {_escaped(text)}")
    said = re.sub(r"[\b\f]", "", said).strip()
    pasted = textwrap.dedent(re.sub(r"[\b\f]", "", example).strip("\n")).rstrip()
    return f"### gripmoe {name}\n\n{said}\n\n```\n{usage}\n```\n\n" + "\n".join(options) + f"\n\n```\n{pasted}\n```\n"


def configuration() -> str:
    """Every key of every file, with its type, its default and the comment that stands beside it in the code."""
    said = []
    for title, shown in FILES.items():
        said.append(f"## {title}\n")
        said += [_keys(each) for each in shown]
    return "\n".join(said)


def _keys(shown: type[types.Strict]) -> str:
    comments, properties = comments_of(shown), shown.model_json_schema()["properties"]
    rows = []
    for name, field in shown.model_fields.items():
        key = field.alias or name
        schema = properties[key]
        if schema.get("type") == "null":  # what only another source has
            continue
        default = "required" if field.is_required() else f"default {_default(field)}"
        comment = comments.get(name)
        rows.append(f"- `{key}` ({_kind(schema)}; {default}){f': {_as_markdown(comment)}' if comment else ''}")
    return f"### {shown.__name__}\n\n{inspect.cleandoc(shown.__doc__ or '')}\n\n" + "\n".join(rows) + "\n"


def _default(field) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, types.Strict):
        return "its defaults"
    return "absent" if value is None else f"`{json.dumps(value)}`"


def _kind(schema: dict) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if name in SHOWN else name
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_kind(each) for each in schema.get("anyOf", schema.get("oneOf", [])) if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        if items := schema.get("prefixItems"):
            return f"a list of {len(items)}: {', '.join(map(_kind, items))}"
        return f"a list of {_kind(schema['items'])}"
    if kind == "object":
        of_pattern = schema.get("patternProperties", {"": schema.get("additionalProperties", True)})
        (values,) = of_pattern.values()
        keys = schema.get("propertyNames", {})
        of_keys = f"{_kind(keys)} to " if "enum" in keys else "names to "
        return f"a mapping of {of_keys}{'any value' if values is True else _kind(values)}"
    if kind in ("integer", "number"):
        words = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
        bounds = [f"{sign} {schema[word]:.15g}" for word, sign in words.items() if word in schema]
        return " ".join([kind, ", ".join(bounds)]).strip()
    return {"boolean": "true or false", "string": "text", None: "any value"}[kind]


def comments_of(shown: type) -> dict[str, str]:
    """The comment of each field of a class: in its line, or in the lines above; for methods the legend of the table."""
    found = {}
    for part in reversed(shown.__mro__):
        if part is not types.Strict and isinstance(part, type(types.Strict)) and part.__module__.startswith("gripmoe"):
            found |= dict(_comments(inspect.getsource(part)))
    return found | (_legend() if shown is methods.Method else {})


def _comments(source: str) -> Iterator[tuple[str, str]]:
    lines = source.splitlines()
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            above, line = [], node.lineno - 2
            while lines[line].strip().startswith("# "):
                above.insert(0, lines[line].strip()[2:])
                line -= 1
            beside = lines[node.end_lineno - 1][node.end_col_offset :].strip()
            comment = " ".join(above) or (beside[2:] if beside.startswith("# ") else "")
            if comment:
                yield node.target.id, comment


def _legend() -> dict[str, str]:
    found, key = {}, None
    for line in methods.TABLE.read_text(encoding="utf-8").splitlines()[2:]:
        if match := re.fullmatch(r"# (\w+) {2,}(.*)", line):
            key = match[1]
            found[key] = match[2]
        elif line.startswith("#   ") and key:
            found[key] += f" {line[1:].strip()}"
        else:
            break
    return found


def further_pages() -> str:
    """Pages that the index does not name, such as one on a further method."""
    return _not_named("*.md")


def further_records() -> str:
    return _not_named("record/**/*.md")


def _not_named(pattern: str) -> str:
    index = (DOCS / "index.md").read_text(encoding="utf-8").splitlines()
    named = {line.rpartition("<")[2].rstrip(">") for line in index}
    there = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.glob(pattern)}
    return "\n".join(sorted(there - named - {"index"}))


def tables() -> str:
    """Every table and figure with its description."""
    said = []
    for name, row in _artefacts().items():
        heading, text = description(name, NOTEBOOKS)
        said.append(f"## {heading}\n\n`{name}`: {', '.join(row['formats'])}.\n\n{text}\n")
    return "\n".join(said)


def notebooks() -> str:
    """The pages that `execute_notebooks` writes."""
    return "\n".join(f"notebooks/{name}" for name in _of_record())


def _of_record() -> list[str]:
    """The tables and figures of `make figures`, which the record has too."""
    return yaml.safe_load((ROOT / "workflow" / "config" / "tiny.yaml").read_text(encoding="utf-8"))["artefacts"]


def execute_notebooks(output: Path) -> None:
    """Executes the notebooks of tables and figures on the record. One kernel serves all, since imports take longest."""
    import nbformat
    from nbclient import NotebookClient
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    files = ROOT / "build" / "notebooks"  # what they save
    for folder in (output, files):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    client = NotebookClient(nbformat.v4.new_notebook(), resources={"metadata": {"path": str(DOCS)}})
    with client.setup_kernel():
        for name in _of_record():
            saved = files / f"{name}.{_artefacts()[name]['formats'][0]}"
            given = {"runs": "record/runs.csv", "output": str(Path("..") / saved.relative_to(ROOT))}
            file = notebook_of(name, NOTEBOOKS)
            notebook = load_notebook_node(str(file))
            client.nb = notebook = parameterize_notebook(notebook, given)
            if file.stem != name:  # that of many tables, which gives their text in its next cell
                notebook.cells[0].source = f"# {description(name, NOTEBOOKS)[0]}"
            for number, cell in enumerate(notebook.cells):
                client.execute_cell(cell, number, execution_count=number)
            nbformat.write(notebook, output / f"{name}.ipynb")


def _artefacts() -> dict[str, dict]:
    return yaml.safe_load((ROOT / "workflow" / "config" / "artefacts.yaml").read_text(encoding="utf-8"))


def _as_markdown(comment: str) -> str:
    return _escaped(re.sub(r"(\w+(?: \| \w+)+):", r"`\1`:", comment))  # values, in the legend of methods


def _escaped(text: str) -> str:
    """Text as Markdown that shows it as it is; what is in backticks stays code."""
    parts = text.split("`")
    return "`".join(part if odd % 2 else re.sub(r"([*_<{\[|])", r"\\\1", part) for odd, part in enumerate(parts))


PARTS = (
    public_names,
    returned_objects,
    commands,
    configuration,
    tables,
    notebooks,
    further_pages,
    further_records,
)


def explorer(output: Path) -> None:
    """The page of all runs, attacks and questions of the record. Questions are generated again from their worlds."""
    import pandas as pd

    from gripmoe.config.project import Project
    from gripmoe.io.files import write_jsonl
    from gripmoe.reporting.explorer import write_explorer
    from gripmoe.worlds.files import files_of

    runs = DOCS / "record" / "runs.csv"
    benchmarks = Project(ROOT / "workflow" / "config", "record_main").benchmarks
    with TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in pd.read_csv(runs).benchmark.unique()]
        for folder in folders:
            for name, rows in files_of(benchmarks[folder.name].data).items():
                write_jsonl(folder / f"{name}.jsonl", rows)
        write_explorer(output, runs, folders, title="Runs of the record")


def draw() -> None:
    """The figures of the page on geometry, which the library computes."""
    from gripmoe.geometry.example import kaczmarz_rate as measured
    from gripmoe.geometry.example import router_row
    from gripmoe.reporting import mechanism
    from gripmoe.reporting.figures import save_picture

    figures = {
        "method_schematic": mechanism.method_schematic(router_row())[0],
        "kaczmarz_rate": mechanism.kaczmarz_rate(measured()),
    }
    for name, figure in figures.items():
        save_picture(figure, DOCS / "images" / f"{name}.png")


if __name__ == "__main__":
    draw()  # once, after a change of the geometry
