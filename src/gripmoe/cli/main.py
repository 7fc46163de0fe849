"""The command line: one subcommand per file; most are rules of the workflow. Each is a function in the module of the
same name.

The module of a subcommand is imported when the subcommand runs, so that `gripmoe --help` imports neither torch nor
pandas.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from gripmoe import __version__
from gripmoe.cli.fork_server import run_on_server
from gripmoe.io.errors import ConfigError
from gripmoe.io.imports import extra_of, missing_module_message

INTERRUPTED = 130  # exit code after Ctrl-C
RESUMED = ("attack", "audit", "finetune-model", "prepare-model", "rewrite", "unlearn")  # after an interruption
COMMANDS = {
    "Models": {
        "audit": "Measure and attack an unlearned model beside its original.",
    },
    "Steps of the workflow": {
        "configure": "Write the resolved configuration of a run.",
        "prepare-data": "Write the questions and corpora of a benchmark.",
        "prepare-model": "Train an embedded model, or download a published one.",
        "finetune-model": "Finetune a base model on the documents of a news benchmark.",
        "trace-routing": "Record inputs, scores and selections of the original routers on retain and forget documents.",
        "fit-basis": "Fit the retain bases of a method.",
        "unlearn": "Train a run until it meets its forget target, or for its maximum number of steps.",
        "import-checkpoint": "Import a model that others have unlearned.",
        "edit-weights": "Erase words, or remove experts, without training.",
        "realign": "Correct a finished run: Method B, the original routers, or UNDO.",
        "evaluate": "Measure a run.",
        "attack": "Attack a run.",
        "collect": "Gather all runs in tidy tables.",
        "explore": "Write one page of all runs, attacks and questions.",
        "manifest": "Write what tables and figures are made of.",
    },
    "Worlds": {
        "plan": "Show the remaining jobs of a world, their cost, and whether they fit into memory.",
        "status": "Show the progress of every run.",
        "summary": "Print the main table, and the statements that hold or do not hold.",
        "why": "Explain why a run would be repeated.",
        "pin": "Show which revisions of models and data to write into models.yaml and benchmarks.yaml.",
        "verify": "Recompute the checksums of a manifest.",
        "clean": "List what belongs to one world alone, or remove it.",
    },
    "Data": {
        "rewrite": "Have a local language model rewrite forget questions, for the prompt attacks.",
    },
}


class Subcommands(TyperGroup):
    """Lists subcommands by name and imports the one that is called."""

    def resolve_command(self, context: typer.Context, arguments: list[str]):
        name, listed, rest = super().resolve_command(context, arguments)
        return name, listed and load(name), rest

    def format_commands(self, context: typer.Context, formatter) -> None:
        for panel, commands in COMMANDS.items():
            with formatter.section(panel):
                formatter.write_dl(list(commands.items()))


def load(name: str) -> TyperCommand:
    """The subcommand `name`: the function of that name in the module of that name."""
    python_name = name.replace("-", "_")
    function = getattr(importlib.import_module(f"gripmoe.cli.{python_name}"), python_name)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(function)
    return typer.main.get_command(single)


app = typer.Typer(cls=Subcommands, rich_markup_mode=None)  # plain help: examples are pasted, and it imports little
for commands in COMMANDS.values():
    for name, summary in commands.items():
        app.command(name, help=summary)(lambda: None)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gripmoe {__version__}")
        raise typer.Exit


@app.callback()
def gripmoe(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Unlearning in mixture-of-experts models under geometric router constraints.

    `gripmoe COMMAND --help` explains a command and shows an example. Snakemake prints every command that it runs.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code: 2, with one line on stderr, for a mistake in its input or an extra
    that is not installed; 130 after Ctrl-C. Every other error is a bug, and raised."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # for classes and functions of one's own beside the Snakefile
    try:
        if (code := run_on_server(arguments)) is not None:
            return code
        code = typer.main.get_command(app).main(arguments, prog_name="gripmoe", standalone_mode=False) or 0
        if code == INTERRUPTED:
            goes_on = "; the same command goes on from what is stored" * (arguments[0] in RESUMED)
            print(f"gripmoe {arguments[0]}: interrupted{goes_on}", file=sys.stderr)
        return code
    except KeyboardInterrupt:  # while another process runs the command
        return INTERRUPTED
    except ConfigError as error:
        called, message, code = f"gripmoe {arguments[0]}", str(error), 2
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if extra_of(module) is None:
            raise
        called, message, code = f"gripmoe {arguments[0]}", missing_module_message(module), 2
    except typer.TyperException as error:  # of its parser
        context = getattr(error, "ctx", None)
        called, code = context.command_path if context else "gripmoe", error.exit_code
        message = f"{error.format_message()} (see {called} --help)"
    print(f"{called}: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
