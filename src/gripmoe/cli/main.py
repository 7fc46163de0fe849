"""The command line: one subcommand per rule of the workflow. Every command can be pasted from a log and run by hand."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

from gripmoe import __version__
from gripmoe.cli.launching import started_together
from gripmoe.io.errors import ConfigError


class Command(NamedTuple):
    """`function` of `gripmoe.cli.<function>`, imported when it is called. Flags take a path, --settings and
    --benchmark JSON. What a path names must exist, unless the command `writes` it."""

    module: str
    function: str
    help: str
    flags: tuple[str, ...]
    optional: tuple[str, ...] = ()
    positional: str | None = None
    many: str | None = None  # a positional argument that takes several paths
    values: tuple[tuple[str, type, object], ...] = ()  # flags that are no paths: name, type, default
    writes: tuple[str, ...] = ("output",)


BY_TORCHRUN = "TORCHELASTIC_RUN_ID"  # only torchrun sets this variable; batch scripts export WORLD_SIZE too
TOGETHER = (("processes", int, 1), ("nodes", int, 1), ("rendezvous", str, None))  # how a model is trained
COMMANDS = (
    Command("configure", "configure", "write the resolved configuration of a cell", ("settings", "output")),
    Command("prepare", "prepare_data", "write a benchmark's questions and corpora", ("settings", "output")),
    Command(
        "prepare",
        "prepare_model",
        "train an embedded model or fetch a published one",
        ("settings", "output"),
        values=(("gpus", int, 0),),
    ),
    Command(
        "prepare",
        "finetune_model",
        "finetune a base model on the documents of a news benchmark",
        ("settings", "benchmark", "model", "data", "output"),
        values=TOGETHER,
    ),
    Command(
        "geometry",
        "trace_routing",
        "record the original routers on retain and forget documents",
        ("settings", "model", "retain-corpus", "forget-corpus", "digest", "output", "forget-output"),
        writes=("digest", "output", "forget-output"),
    ),
    Command(
        "geometry",
        "fit_basis",
        "fit the retain bases of a method",
        ("settings", "model", "trace", "forget-trace", "digest", "output"),
        writes=("digest", "output"),
    ),
    Command(
        "unlearn",
        "unlearn",
        "train a cell until it has forgotten",
        ("run", "model", "data", "trace", "forget-trace", "output"),
        optional=("bases", "reference", "references"),
        values=(
            *TOGETHER,
            ("reference-memory", float, 8.0),
            ("basis-memory", float, 16.0),
            ("basis-host-memory", float, 64.0),
        ),
        writes=("references", "output"),
    ),
    Command(
        "unlearn",
        "realign",
        "correct the routers of a finished run (Method B)",
        ("run", "model", "checkpoint", "retain-corpus", "trace", "output"),
    ),
    Command(
        "evaluate",
        "evaluate",
        "measure a cell",
        ("run", "benchmark", "model", "checkpoint", "data", "questions", "output"),
        optional=("reference",),
        writes=("questions", "output"),
    ),
    Command(
        "attack",
        "attack",
        "attack a cell",
        ("settings", "run", "benchmark", "model", "checkpoint", "data", "answers", "questions", "output"),
        writes=("questions", "output"),
    ),
    Command(
        "rewrite",
        "rewrite",
        "have a local language model rewrite forget questions, for the prompt attacks",
        ("questions", "output"),
        values=(("model", str, None), ("style", str, "verse")),
    ),
    Command(
        "plan",
        "plan",
        "what a world has left to do, what it costs, whether it fits",
        (),
        values=(
            ("world", str, "tiny"),
            ("config", Path, Path("workflow/config")),
            ("gpu-memory", float, 141.0),
            ("host-memory", float, 2000.0),
            ("jobs", int, 100),
            ("budget", float, None),
            ("cells", bool, False),
            ("tflops", float, 98.9),
            ("methods-table", bool, False),
        ),
    ),
    Command(
        "plan",
        "status",
        "where every cell of a world stands",
        (),
        values=(("world", str, "tiny"), ("config", Path, Path("workflow/config"))),
    ),
    Command(
        "pin",
        "pin",
        "which revisions of models and data to write into the catalogues",
        (),
        values=(("world", str, "tiny"), ("config", Path, Path("workflow/config"))),
    ),
    Command(
        "plan",
        "why",
        "why a cell (model.benchmark.objective.method.seed, or the beginning of that) would run again",
        (),
        positional="cell",
        values=(("world", str, "tiny"),),
    ),
    Command(
        "clean",
        "clean",
        "list what belongs to a world alone, or remove it",
        (),
        values=(("world", str, "tiny"), ("config", Path, Path("workflow/config")), ("remove", bool, False)),
    ),
    Command("report", "manifest", "write what artefacts are made of", ("runs", "output"), many="files"),
    Command("report", "verify", "recompute the checksums of a manifest", ("manifest",)),
    Command(
        "report",
        "collect",
        "gather all cells in tidy tables",
        ("output", "histories", "answers", "attacks"),
        many="cells",
        writes=("output", "histories", "answers", "attacks"),
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code: 2, with one line on stderr, for a mistake in its input. Every other
    error is a bug, and raised."""
    parser = argparse.ArgumentParser(prog="gripmoe", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"gripmoe {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        sub = subparsers.add_parser(command.function.replace("_", "-"), help=command.help)
        sub.set_defaults(chosen=command)
        for flag in (*command.flags, *command.optional):
            kind = str if flag in ("settings", "benchmark") else Path
            sub.add_argument(f"--{flag}", type=kind, required=flag not in command.optional)
        for flag, kind, default in command.values:
            taken = {"action": "store_true"} if kind is bool else {"type": kind, "default": default}
            sub.add_argument(f"--{flag}", **taken, help=f"default: {default}")
        if command.positional:
            sub.add_argument(command.positional)
        if command.many:
            sub.add_argument(command.many, nargs="+", type=Path)

    args = parser.parse_args(argv)
    try:
        _require_what_is_read(args)
        if getattr(args, "processes", 1) > 1 and BY_TORCHRUN not in os.environ:  # what is started calls this again
            command = started_together(args.processes, args.nodes, args.rendezvous, argv or sys.argv[1:], os.environ)
            os.execvp(command[0], command)
        module = importlib.import_module(f"gripmoe.cli.{args.chosen.function}")
        getattr(module, args.chosen.function)(args)
    except ConfigError as error:
        print(f"gripmoe {args.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _require_what_is_read(args: argparse.Namespace) -> None:
    """Raises ConfigError if a path is missing that the command reads."""
    command = args.chosen
    read = [flag for flag in (*command.flags, *command.optional) if flag not in command.writes]
    given = [(f"--{flag}", getattr(args, flag.replace("-", "_"))) for flag in read]
    given += [(command.many, path) for path in getattr(args, command.many or "", [])]
    for flag, path in given:
        if isinstance(path, Path) and not path.exists():
            raise ConfigError(f"{flag}: {path}: no such file or folder")


if __name__ == "__main__":
    sys.exit(main())
