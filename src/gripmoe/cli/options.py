"""The flags that several commands share, each explained once. The commands annotate their parameters with these types.

A path that a command reads must exist; the command line names its flag otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def read_file(flag: str, help: str) -> Any:
    return typer.Option(flag, exists=True, dir_okay=False, help=help)


def written_file(flag: str, help: str) -> Any:
    return typer.Option(flag, dir_okay=False, help=help)


def _json(flag: str, help: str) -> Any:
    return typer.Option(flag, metavar="JSON", help=help)


# Configuration
Settings = Annotated[str, _json("--settings", "The configuration that the command depends on; Snakemake prints it.")]
DocumentSettings = Annotated[str, _json("--benchmark", "Documents of a benchmark, as benchmarks.yaml has them.")]
BenchmarkSettings = Annotated[str, _json("--benchmark", "The benchmark of the run, as benchmarks.yaml has it.")]
RunFile = Annotated[Path, read_file("--run", "run.yaml, the resolved configuration of the run.")]
World = Annotated[str, typer.Option("--world", help="The name of a world in the folder --config, or a world file.")]
ConfigFolder = Annotated[Path, typer.Option("--config", file_okay=False, help="The folder of worlds and catalogues.")]

# What earlier steps have written. Weights lie beside the description of their model.
ModelFile = Annotated[Path, read_file("--model", "model.json of the original model.")]
BaseFile = Annotated[
    Path | None, read_file("--base", "model.json of the model with the skills; embedded models with facts only.")
]
CheckpointFile = Annotated[Path, read_file("--checkpoint", "checkpoint.json of a run, or model.json of a baseline.")]
RetrainedFile = Annotated[Path | None, read_file("--retrained", "model.json of the retrained model; news only.")]
DataFolder = Annotated[
    Path, typer.Option("--data", exists=True, file_okay=False, help="The questions and corpora of the benchmark.")
]
RetainCorpus = Annotated[Path, read_file("--retain-corpus", "The documents to retain, as JSON lines.")]
ForgetCorpus = Annotated[Path, read_file("--forget-corpus", "The documents to forget, as JSON lines.")]
TraceFile = Annotated[Path, read_file("--trace", "The routing trace of the retain documents.")]
ForgetTraceFile = Annotated[Path, read_file("--forget-trace", "The routing trace of the forget documents.")]
BasesFile = Annotated[Path | None, read_file("--bases", "The retain bases of the method, if it has any.")]
RunsFile = Annotated[Path, read_file("--runs", "The tidy table of all runs.")]

# What the command writes
OutputFile = Annotated[Path, written_file("--output", "The file to write.")]
DigestFile = Annotated[Path, written_file("--digest", "The file to write checksums and sizes of the output to.")]
ItemsFile = Annotated[Path, written_file("--questions", "The file to write the score of every item to.")]

Processes = Annotated[int, typer.Option("--processes", min=1, help="Processes that train the model, one on each GPU.")]
