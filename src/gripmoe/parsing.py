"""YAML and JSON into typed objects, with errors that name the file, the key and what would be valid. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError


class ConfigError(ValueError):
    """A mistake in a configuration file; the message names the file, the key and what would be valid."""


def parse_settings(target: Any, text: str) -> Any:
    """A configuration object of type `target` from its JSON, as rules pass it to commands."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--settings: not valid JSON: {error}") from None
    return parse_as(target, value, Path("--settings"))


def load_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises ConfigError if it is missing or not YAML."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: file not found") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


def parse_as(target: Any, value: Any, path: Path, prefix: str = "") -> Any:
    """`value` as an object of type `target`. Raises ConfigError that names `path`, the key below `prefix`, and what is
    valid."""
    try:
        return TypeAdapter(target).validate_python(value)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(target, item, path, prefix) for item in error.errors())) from None


def _describe(target: Any, item: dict, path: Path, prefix: str) -> str:
    keys = [
        str(part)
        for part in item["loc"]
        if part not in ("embedded", "published", "muse", "finetuned", "ForgetTarget", "ReferenceTarget")
    ]
    key = ".".join(part for part in (prefix, *keys) if part)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = "unknown key"
        if fields := _valid_keys(target, item["loc"][:-1]):
            message += f"; valid keys: {', '.join(fields)}"
    elif item["type"] == "missing":
        message = "this key is required"
    elif "input" in item and not isinstance(item["input"], dict):
        message += f" (got {item['input']!r})"
    return f"{path}: {key or 'file'}: {message}"


def _valid_keys(target: Any, path: tuple) -> list[str]:
    """The keys of the object at `path` within a model; none where its type depends on its value."""
    for key in path:
        field = getattr(target, "model_fields", {}).get(key)
        target = field.annotation if field else None
    return list(getattr(target, "model_fields", {}))
