"""What a world file may say, and the resolved configuration of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt

from gripmoe.config.benchmarks import Task
from gripmoe.config.methods import Method
from gripmoe.config.reading import parse_as
from gripmoe.config.training import Relearning, Training
from gripmoe.config.types import EachOnce, Name, Names, Seed, Strict
from gripmoe.io.files import read_yaml

NO_OBJECTIVE = "none"  # the {objective} of baselines, which train nothing


class Artefact(Strict):
    """A table or figure: `notebooks/comparison.ipynb`, or a notebook of its name, renders it into these formats."""

    # Tables: csv, tex, html, md; figures: csv, pdf, png
    formats: list[Literal["csv", "tex", "html", "md", "pdf", "png"]] = Field(min_length=1)


class World(Strict):
    """What to run. `training` is changed by `objective_training`, then by `benchmark_training` (for "all" objectives,
    then for one), then by the method, then by `overrides` (for a method, then for "objective/method")."""

    models: Names = Field(min_length=1)  # rows of models.yaml
    benchmarks: Names = Field(min_length=1)  # rows of benchmarks.yaml
    objectives: Names = Field(min_length=1)  # gd, kl, npo, rmu, unlikelihood, and rows of objectives.yaml
    methods: Names = Field(min_length=1)  # under every objective
    extra_methods: dict[Name, Names] = {}  # under one objective only
    # Models that others have unlearned, by the names that tables give them: a folder or hub id; of several models
    # {model: folder}
    external: dict[Name, str | dict[Name, str]] = {}
    seeds: Annotated[list[Seed], EachOnce] = Field(min_length=1)  # every run is trained once with each
    training: Training  # of every run
    objective_training: dict[Name, dict[str, Any]]  # changes of `training` by objective
    benchmark_training: dict[Name, dict[Name, dict[str, Any]]] = {}  # by benchmark, then by objective or "all"
    overrides: dict[str, dict[str, Any]] = {}  # by "method" or "objective/method"
    relearning: Relearning | None = None  # an attack that is left out without it
    original_memory: PositiveInt = 8  # GB of host memory for answers of the original model; the others lie on disk
    basis_memory: PositiveInt = 16  # GB of each GPU for Method A's bases
    # GB of host memory of each process for further bases, which every step copies; the others are read from disk
    basis_host_memory: Annotated[int, Field(ge=0)] = 64
    # How many a model takes, one if absent; a process on each trains the model. With 0 its jobs compute
    # on the CPU, unless they see a GPU.
    gpus: dict[Name, NonNegativeInt] = {}
    artefacts: Names  # rows of artefacts.yaml

    @property
    def all_methods(self) -> list[str]:
        """Every method that any objective has, and every external checkpoint, once."""
        extra = [name for names in self.extra_methods.values() for name in names]
        return list(dict.fromkeys([*self.methods, *extra, *self.external]))

    def methods_of(self, objective: str) -> list[str]:
        return list(dict.fromkeys([*self.methods, *self.extra_methods.get(objective, [])]))


class OwnClass(Strict):
    """A class that is not of the package, "module:Class", and the digest of its file."""

    path: str
    sha256: str


class RunKey(NamedTuple):
    """The key of a run: what it is of, and its seed."""

    model: str
    benchmark: str
    objective: str
    method: str
    seed: int

    def __str__(self) -> str:
        return ".".join(map(str, self))

    @property
    def folder(self) -> Path:
        """The folder of the run, below the results of its world."""
        return Path(*map(str, self))


class Run(Strict):
    """One run, completely resolved."""

    model: Name
    benchmark_name: Name
    benchmark: Task
    objective: str
    own_objective: OwnClass | None = None  # one that a configuration folder adds to those of the package
    method_name: Name
    method: Method
    # The class of `method.constraint`, if it is not of the package.
    own_constraint: OwnClass | None = Field(None, exclude_if=lambda own: own is None)
    seed: int
    training: Training | None
    # That train it together, each with its own batches. A 1 is not written to run.yaml.
    processes: PositiveInt = Field(1, exclude_if=lambda count: count == 1)


def load_run(path: Path) -> Run:
    return parse_as(Run, read_yaml(path), path)
