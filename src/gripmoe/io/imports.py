"""Code that a configuration names."""

from __future__ import annotations

import importlib
from typing import Any

from gripmoe.io.errors import ConfigError


def imported(path: str, where: str) -> Any:
    """What "module:name" stands for. Raises ConfigError, naming `where`, if it is not there."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"{where}: {error}; is its file on PYTHONPATH?") from None
