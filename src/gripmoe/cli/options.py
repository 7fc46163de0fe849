"""The flags that several commands share, each explained once. The commands annotate their parameters with these types.

A path that a command reads must exist; the command line names its flag otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _file(flag: str, help: str) -> Any:
    return typer.Option(flag, exists=True, dir_okay=False, help=help)


def _written(flag: str, help: str) -> Any:
    return typer.Option(flag, dir_okay=False, help=help)


def _json(flag: str, help: str) -> Any:
    return typer.Option(flag, metavar="JSON", help=help)


# Configuration
Settings = Annotated[str, _json("--settings", "The configuration that the command depends on; Snakemake prints it.")]
TaskSettings = Annotated[str, _json("--benchmark", "The task of a benchmark, as benchmarks.yaml has it.")]
BenchmarkSettings = Annotated[str, _json("--benchmark", "The benchmark of the run, as benchmarks.yaml has it.")]
RunFile = Annotated[Path, _file("--run", "run.yaml, the resolved configuration of the run.")]
World = Annotated[str, typer.Option("--world", help="The name of a world in the folder --config, or a world file.")]
ConfigFolder = Annotated[Path, typer.Option("--config", file_okay=False, help="The folder of worlds and catalogues.")]

# What earlier steps have written. Weights lie beside the description of their model.
ModelFile = Annotated[Path, _file("--model", "model.json of the original model.")]
BaseFile = Annotated[
    Path | None, _file("--base", "model.json of the model with the skills; embedded models with facts only.")
]
CheckpointFile = Annotated[Path, _file("--checkpoint", "checkpoint.json of a run, or model.json of a baseline.")]
RetrainedFile = Annotated[Path | None, _file("--retrained", "model.json of the retrained model; news only.")]
DataFolder = Annotated[
    Path, typer.Option("--data", exists=True, file_okay=False, help="The questions and corpora of the benchmark.")
]
RetainCorpus = Annotated[Path, _file("--retain-corpus", "The documents to retain, as JSON lines.")]
ForgetCorpus = Annotated[Path, _file("--forget-corpus", "The documents to forget, as JSON lines.")]
TraceFile = Annotated[Path, _file("--trace", "The routing trace of the retain documents.")]
ForgetTraceFile = Annotated[Path, _file("--forget-trace", "The routing trace of the forget documents.")]
BasesFile = Annotated[Path | None, _file("--bases", "The retain bases of the method, if it has any.")]
AnswersFile = Annotated[Path, _file("--answers", "questions.csv, which `gripmoe evaluate` has written.")]

# What the command writes
OutputFile = Annotated[Path, _written("--output", "The file to write.")]
DigestFile = Annotated[Path, _written("--digest", "The file to write checksums and sizes of the output to.")]
ItemsFile = Annotated[Path, _written("--questions", "The file to write the score of every item to.")]

Processes = Annotated[int, typer.Option("--processes", min=1, help="Processes that train the model, one on each GPU.")]
