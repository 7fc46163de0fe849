"""Code that a configuration names, and packages that only some of the software needs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gripmoe.io.errors import ConfigError

EXTRAS = {  # modules that only some commands need, by the extra of pyproject.toml that installs them
    "eval": {"datasets", "jinja2", "lm_eval", "peft", "rouge_score", "sklearn"},
    "report": {"itables", "jinja2", "matplotlib", "pandas", "PIL", "scipy"},
}


def extra_of(module: str) -> str | None:
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def missing_module_message(module: str) -> str:
    """What to install, for a module of an extra."""
    return f"needs {module}, which is not installed: pip install 'gripmoe[{extra_of(module)}]'"


def require_extras(*extras: str) -> None:
    """Raises ModuleNotFoundError, naming the extra, if one of its modules is missing. Call it before long work."""
    for module in sorted(set().union(*(EXTRAS[extra] for extra in extras))):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(missing_module_message(module), name=module)


def let_jobs_import_from(folder: Path) -> None:
    """Adds a folder to the PYTHONPATH of the processes that this one starts, behind what is there."""
    folders = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*folders, str(folder)]))


def imported(path: str, where: str) -> Any:
    """Imports "module:name". Raises ConfigError, naming `where`, if it does not exist."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        is_its_own = error.name and f"{module}.".startswith(f"{error.name}.")
        remedy = "is its file on PYTHONPATH?" if is_its_own else f"{module} imports it; install it"
        raise ConfigError(f"{where}: {error}; {remedy}") from None
    if not hasattr(found, name):
        file = getattr(found, "__file__", module)  # a built-in module has none
        raise ConfigError(f"{where}: {file} has no {name!r}; name what it defines")
    return getattr(found, name)


def make_object(path: str, settings: Mapping[str, Any], seed: int, where: str) -> Any:
    """Makes an object of the class "module:Class" from its settings and, if the class takes one, the seed. Raises
    ConfigError, naming `where`, for a class that does not exist or takes other settings."""
    named = imported(path, where)
    signature = inspect.signature(named)
    arguments = {**({"seed": seed} if "seed" in signature.parameters else {}), **settings}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None
    return named(**arguments)
