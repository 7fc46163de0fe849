"""What is wrong with a shell line that calls this package."""

import shlex

from gripmoe.cli.main import COMMANDS, load

SUMMARIES = {name: summary for panel in COMMANDS.values() for name, summary in panel.items()}


def flags_of(name: str) -> dict:
    """The options of a command, by flag."""
    return {flag: option for option in load(name).params if option.param_type_name == "option" for flag in option.opts}


def wrong_with(line: str) -> list[str]:
    """What a shell line calls that is not there, and the flags that it lacks."""
    _, name, *rest = shlex.split(line)
    if name not in SUMMARIES:
        return [name]
    known = flags_of(name)
    given = [part.partition("=")[0] for part in rest if part.startswith("--")]
    return [f for f in given if f not in known] + [f for f in known if known[f].required and f not in given]
