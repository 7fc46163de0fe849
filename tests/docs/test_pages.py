"""The pages of docs/: their Python runs as pasted, and what they name is there."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from commands import SUMMARIES, flags_of, wrong_with
from gripmoe.config import benchmarks, methods, models, training, types, world
from gripmoe.config.project import Project
from gripmoe.io.files import read_yaml
from gripmoe.reporting.specifications import Specification

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = ROOT / "workflow" / "config"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
    if "record" not in path.parts
}
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", flags=re.MULTILINE)
OWN = {
    "my_method",
    "my_objective",
    "my_attack",
    "my_table",
    "my_data",
    "mine",
    "NAME",
    "WORLD",
    "name",
}  # made-up worlds


def blocks(page: str, language: str) -> list[str]:
    return [text for info, text in FENCE.findall(PAGES[page]) if info == language]


def with_python() -> list[str]:
    return [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", with_python())
def test_the_python_of_a_page_runs_as_pasted(page, tmp_path, monkeypatch):
    """In one go, in a folder that has docs/. A block that begins with the name of a file is that file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "docs").symlink_to(DOCS)
    names = {"__name__": "__main__"}
    for info, code in FENCE.findall(PAGES[page]):
        if info != "python":
            continue
        if file := re.match(r"# (\w+)\.py\n", code):
            (tmp_path / f"{file[1]}.py").write_text(code)
            monkeypatch.delitem(sys.modules, file[1], raising=False)
        else:
            exec(compile(code, page, "exec"), names)


def test_the_first_steps_begin_with_the_code_of_the_readme():
    assert blocks("docs/start.md", "python")[0] == blocks("README.md", "python")[0]


@pytest.mark.parametrize("page", [page for page in PAGES if "\n```yaml\n# workflow/config/" in PAGES[page]])
def test_the_configuration_of_a_page_is_valid(page, tmp_path, monkeypatch):
    """Rows are added to the catalogues that are there; a world, where a page has one, has runs."""
    folder = tmp_path / "workflow" / "config"
    shutil.copytree(CONFIG, folder)
    for file in re.findall(r"^```python\n(# (\w+)\.py\n(?:.*\n)*?)```", PAGES[page], flags=re.MULTILINE):
        (tmp_path / f"{file[1]}.py").write_text(file[0])
    monkeypatch.syspath_prepend(tmp_path)
    added = {}
    for text in blocks(page, "yaml"):
        if text.startswith("# src/gripmoe/reporting/comparisons.yaml\n"):
            assert [Specification(**table) for table in yaml.safe_load(text).values()]
            continue
        file = re.match(r"# workflow/config/(\w+\.yaml)\n", text)[1]
        with (folder / file).open("a", encoding="utf-8") as stream:
            stream.write(f"\n{text}")
        added[file] = set(read_yaml(folder / file))
    worlds = [file.removesuffix(".yaml") for file in added if file.startswith("my_")] or ["tiny"]
    for name in worlds:
        project = Project(folder, name)
        assert list(project.run_keys())
        for file, rows in added.items():
            if not file.startswith("my_"):
                assert rows <= set(getattr(project, file.removesuffix(".yaml")))


def shell_lines(page: str) -> list[str]:
    """Lines of blocks without a language, continued ones as one, without comments."""
    text = "".join(blocks(page, "") + blocks(page, "bash")).replace("\\\n", " ")
    return [line.partition(" #")[0].partition(" > ")[0].strip() for line in text.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_calls_what_is_there(page):
    """In blocks whole lines; in running text names and flags."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    inline = [code.replace("\n", " ") for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCE.sub("", PAGES[page]))]
    for line in shell_lines(page):
        if line.startswith("gripmoe "):
            assert not wrong_with(line), line
    for line in [*shell_lines(page), *inline]:
        if match := re.match(r"gripmoe ([a-z-]+)(.*)", line):
            assert match[1] in SUMMARIES, line
            assert set(re.findall(r" (--[a-z-]+)", match[2])) <= {"--help", *flags_of(match[1])}, line
        if match := re.match(r"make ([a-z][a-z-]*)", line):
            assert match[1] in targets, line
        if re.match(r"(gripmoe|make|snakemake|python workflow)\b", line):
            worlds = set(re.findall(r"(?:\bworld=|\bWORLD=|--world )(\w+)", line)) - OWN
            assert worlds <= {path.stem for path in CONFIG.glob("*.yaml")}, line


def test_the_controls():
    assert wrong_with("gripmoe audit --orginal a --unlearned b --output c") == ["--orginal", "--original"]
    assert "--methods-table" in flags_of("plan") and "--original" not in flags_of("plan")


@pytest.fixture
def generate(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return runpy.run_path(DOCS / "generate.py")


def test_the_index_names_every_page(generate):
    """Or `make docs` fails. What it does not name stands under "How it works", or in the record."""
    named = {line.rpartition("<")[2].rstrip(">") for line in PAGES["docs/index.md"].splitlines()}
    there = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")} - {"index"}
    further = {*generate["further_pages"]().split(), *generate["further_records"]().split()}
    assert there == (there & named) | further and not further & named


def test_the_reference_has_every_key(generate):
    """Of every class that a configuration file may be made of; and the comment of a key, wherever it stands."""
    defined = {
        thing
        for module in (benchmarks, methods, models, training, world)
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, types.Strict) and thing.__module__ == module.__name__
    }
    # Of Benchmark; of Relearning and UndoConfig; of run.yaml, which the workflow writes.
    inside = {benchmarks.Documents, benchmarks.Task, training.Finetuning, world.Run, world.OwnClass}
    assert {shown for each in generate["FILES"].values() for shown in each} == defined - inside
    said = generate["configuration"]()
    for shown in defined - inside:
        part = said.partition(f"### {shown.__name__}\n")[2].partition("\n### ")[0]
        schema = shown.model_json_schema()["properties"]
        assert set(re.findall(r"^- `(\w+)`", part, flags=re.MULTILINE)) == {
            key for key in schema if schema[key].get("type") != "null"
        }
    assert generate["comments_of"](training.Training)["gradient_accumulation"] == "passes of a step"
    assert generate["comments_of"](world.World)["external"].startswith("Models that others have unlearned, by the")
    comments = generate["comments_of"](methods.Method)
    assert comments.keys() == methods.Method.model_fields.keys() and "arguments of that class" in comments["settings"]


def test_the_reference_has_every_command_and_public_name(generate):
    said = generate["commands"]()
    for name in SUMMARIES:
        part = said.partition(f"### gripmoe {name}\n")[2].partition("\n### ")[0]
        assert all(flag in part for flag in flags_of(name)), name
    import gripmoe

    assert set(re.findall(r":: gripmoe\.(\w+)\n", generate["public_names"]())) == set(gripmoe.__all__)
