"""Code that a configuration names, and packages that only some of the software needs."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from gripmoe.io.errors import ConfigError

EXTRAS = {  # modules that only some commands need, by the extra of pyproject.toml that installs them
    "eval": {"datasets", "jinja2", "lm_eval", "peft", "rouge_score", "sklearn"},
    "report": {"itables", "jinja2", "matplotlib", "pandas", "PIL", "scipy"},
}


def extra_of(module: str) -> str | None:
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def without(module: str) -> str:
    """What to say where a module of an extra is missing."""
    return f"needs {module}, which is not installed: pip install 'gripmoe[{extra_of(module)}]'"


def require_extras(*extras: str) -> None:
    """Raises ModuleNotFoundError that names the extra whose module is missing: before work that would end there."""
    for module in sorted(set().union(*(EXTRAS[extra] for extra in extras))):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(without(module), name=module)


def imported(path: str, where: str) -> Any:
    """What "module:name" stands for. Raises ConfigError, naming `where`, if it is not there."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"{where}: {error}; is its file on PYTHONPATH?") from None
