"""`gripmoe clean`: remove what belongs to one world alone, or to no world."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from gripmoe.cli.options import ConfigFolder, World
from gripmoe.config.catalogues import Catalogues
from gripmoe.config.project import Project
from gripmoe.config.world_files import world_content, world_files
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import remove as remove_path
from gripmoe.io.locks import exclusive
from gripmoe.reporting import TABLES

NAMED = ("collect", "explore", "manifest", "plan")  # rules whose logs are named after the world
LOGS = "logs/*/*.*.log"
SHAPES = (  # of models, data, what runs share, runs; none is one of logs
    "models/*",
    "data/*",
    "*/*/routing*",
    "*/*/bases/*",
    "*/*/original_answers",
    "*/*/*/*/[0-9]*",
)


def clean(
    *,
    world: World = "tiny",
    config: ConfigFolder = Path("workflow/config"),
    unlisted: Annotated[bool, typer.Option("--unlisted", help="List files that no world names.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is listed.")] = False,
) -> None:
    """List what belongs to one world alone, or remove it.

    The list holds runs, models, data, tables, notebooks, figures and logs that no other world names. With
    --unlisted it holds runs, models, data and their logs in the world's results folder that no world names: those
    of a method, seed or model that its file no longer lists. Worlds outside of --config are not known.

    \b
    Example:
      gripmoe clean --world tiny --unlisted
    """
    project, catalogues = Project(config, world), Catalogues(config)
    others = []
    for file in world_files(config):
        try:
            others += [Project(config, file.stem, catalogues, compare=False)] if file.stem != project.name else []
        except ConfigError as error:
            _, files = world_content(config, file)
            if files[-1].stem == project.results_name:  # else it shares nothing
                raise ConfigError(f"{error}. This world shares results with {world}; mend it first") from None
    results = project.results
    known = {f"runs_{each.name}.csv" for each in (project, *others)}
    if unknown := sorted(file for file in results.glob("runs_*.csv") if file.name not in known):
        raise ConfigError(
            f"{unknown[0]}: {config} has no world of this name, which may share runs with {world}. Copy the "
            "file of that world there, or remove this table"
        )
    of_others = set().union(*map(written, others))
    if unlisted:
        known = _found(written(project) | of_others)
        there = {path for shape in SHAPES for path in results.glob(shape) if results / "logs" not in path.parents}
        there |= set(results.glob(LOGS))
        paths = sorted(path for path in there - known if not path.name.startswith("."))  # such as a half-written file
    else:
        paths = sorted(_found(written(project) - of_others))
    for path in paths if remove else ():
        with _locked(path):  # nothing is removed while another process works on one of the folders
            pass
    for path in paths:
        print(path)
        if remove:
            with _locked(path):
                remove_path(path)
            _remove_empty(path.parents[:-2])  # results and paper_figures stay
    print(f"{len(paths)} files and folders{' removed' if remove else '; --remove removes them'}")


def _locked(path: Path) -> AbstractContextManager[None]:
    """The lock of a folder in which processes work, such as that of a run."""
    return exclusive(path) if (path / ".lock").exists() else nullcontext()


def written(project: Project) -> set[str]:
    """Patterns of the files and folders that the workflow writes for a world. What two worlds share has the same
    pattern in both."""
    name, models = project.name, project.models_needed
    patterns = {f"notebooks_{name}", f"runs_{name}.provenance.json", f"logs/render_{name}"}
    patterns |= {f"{table}_{name}.csv" for table in TABLES} | {f"logs/{rule}_{name}.log" for rule in NAMED}
    patterns |= {f"models/{model}" for model in models}
    steps = set(models)
    for key in project.run_keys():
        model, benchmark, method = key.model, key.benchmark, key.method
        pair = f"{model}/{benchmark}"
        patterns |= {str(key.folder), f"{pair}/bases/{method}.*", f"data/{benchmark}"}
        patterns |= {f"{pair}/routing.*", f"{pair}/routing_forget.*", f"{pair}/original_answers"}
        steps |= {benchmark, f"{model}.{benchmark}", f"{model}.{benchmark}.{method}", str(key)}
    for step in steps:
        patterns.add(f"logs/*/{step}.log")
    return {f"paper_figures/{name}", *(f"{project.results}/{pattern}" for pattern in patterns)}


def _found(patterns: Iterable[str]) -> set[Path]:
    return {path for pattern in patterns for path in Path().glob(pattern)}


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes empty folders, from the innermost outwards, until one is not empty."""
    for folder in folders:
        if any(folder.iterdir()):
            break
        folder.rmdir()
