"""Configuration into typed objects, with errors that name the file, the key and what would be valid. No torch here."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_yaml

_adapter = functools.cache(TypeAdapter)  # a world is checked against other worlds: thousands of times
SHOWN = 80  # names in an error
NAME = r"^[a-z][a-z0-9_]*$"  # of whatever a configuration names, and of folders of results
SOURCES = ("embedded", "published", "muse", "finetuned")  # pydantic's names of the alternatives in its unions


def parse_settings(target: Any, text: str, flag: str = "--settings") -> Any:
    """A configuration object of type `target` from its JSON, as rules pass it to commands."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag}: not valid JSON: {error}") from None
    return parse_as(target, value, Path(flag))


def parse_as(target: Any, value: Any, path: Path, prefix: str = "") -> Any:
    """`value` as an object of type `target`. Raises ConfigError that names `path`, the key below `prefix`, and what is
    valid."""
    try:
        return _adapter(target).validate_python(value)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(item, path, prefix) for item in error.errors())) from None


class Mistake(ValueError):
    """An error of a validator about one key of its object."""

    def __init__(self, key: str, message: str):
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


def _describe(item: Any, path: Path, prefix: str) -> str:
    loc = item["loc"]
    # pydantic names the kind of model or data too, first or after `data`; a key of the file may have the same name.
    is_kind = [part in SOURCES and (not place or loc[place - 1] == "data") for place, part in enumerate(loc)]
    keys = [str(part) for part, skipped in zip(loc, is_kind, strict=True) if not skipped]
    kind, context, message = item["type"], item.get("ctx", {}), item["msg"].removeprefix("Value error, ")
    if isinstance(context.get("error"), Mistake):
        keys.append(context["error"].key)
        message = context["error"].message
    elif kind.startswith("union_tag"):
        keys.append(context["discriminator"].strip("'"))
        message = f"one of {context['expected_tags']} (got {context['tag']!r})" if "tag" in context else ""
    elif kind != "missing" and not isinstance(item["input"], dict):
        message += f" (got {item['input']!r})"
    if kind in ("missing", "union_tag_not_found"):
        message = "this key is required"
    return f"{path}: {'.'.join(filter(None, map(str, (prefix, *keys)))) or 'file'}: {message}"


def read_mapping(path: Path) -> dict:
    """The mapping of a YAML file. Raises ConfigError for anything else, and for a key that stands twice."""
    content = read_yaml(path, check=functools.partial(_require_each_key_once, path=path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping, `key: value`, at its top level")
    return content


def read_catalogue(path: Path, row_type: Any) -> dict[str, Any]:
    """The rows of a YAML file, by name. Raises ConfigError for the first row or name that is not valid."""
    rows = read_mapping(path)
    for name in rows:
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise ConfigError(f"{path}: {name!r}: a name has small letters, digits and _, and begins with a letter")
    return {name: parse_as(row_type, row, path, prefix=name) for name, row in rows.items()}


def _require_each_key_once(node: yaml.Node | None, path: Path) -> None:
    """Of two equal keys of a mapping, YAML keeps the last."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    lines: dict[str, int] = {}
    for key, _ in pairs:
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ConfigError(
                f"{path}: line {line}: {key.value!r} stands in line {lines[key.value]} already: join them"
            )
        lines[key.value] = line
    for child in [value for _, value in pairs] or (node.value if isinstance(node, yaml.SequenceNode) else []):
        _require_each_key_once(child, path)


def require_known(name: str, known: Collection[str], where: str) -> None:
    """Raises ConfigError that names the most similar of the `known` names, or all of them, if `name` is not known."""
    if name not in known:
        close = difflib.get_close_matches(name, list(known), n=1)
        listed = list(known) if len(known) <= SHOWN else [*list(known)[:SHOWN], "..."]
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(listed)}"
        raise ConfigError(f"{where}: unknown name {name!r}; {hint}")
