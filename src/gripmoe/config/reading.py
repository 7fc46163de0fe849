"""Configuration into typed objects, with errors that name the file, the key and what would be valid. No torch here."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_yaml


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
        return TypeAdapter(target).validate_python(value)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(target, item, path, prefix) for item in error.errors())) from None


def _describe(target: Any, item: dict, path: Path, prefix: str) -> str:
    keys = [
        str(part)
        for part in item["loc"]
        if part not in ("embedded", "published", "muse", "finetuned", "ForgetTarget", "RetrainedTarget")
    ]
    key = ".".join(part for part in (prefix, *keys) if part)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        key = ".".join(part for part in (key, item["ctx"]["discriminator"].strip("'")) if part)
        message = "this key is required"
        if item["type"] == "union_tag_invalid":
            message = f"one of {item['ctx']['expected_tags']} (got {item['ctx']['tag']!r})"
    elif item["type"] == "extra_forbidden":
        message = "unknown key"
        if fields := _valid_keys(target, item["loc"][:-1]):
            message += f"; valid keys: {', '.join(fields)}"
    elif item["type"] == "missing":
        message = "this key is required"
    elif "input" in item and not isinstance(item["input"], dict):
        message += f" (got {item['input']!r})"
    return f"{path}: {key or 'file'}: {message}"


def _valid_keys(target: Any, path: tuple) -> list[str]:
    """The keys of the object at `path` within a model. Where that may be of several types, the path names the one that
    its content asks for: by the class, or by the value of `source`."""
    for key in path:
        models = _models_in(target)
        named = [model for model in models if key in (model.__name__, *_sources(model))]
        fields = [model.model_fields[key] for model in models if key in model.model_fields]
        target = named[0] if named else fields[0].annotation if fields else None
    models = _models_in(target)
    return list(models[0].model_fields) if len(models) == 1 else []


def _models_in(target: Any) -> list[type[BaseModel]]:
    if isinstance(target, type) and issubclass(target, BaseModel):
        return [target]
    return [model for part in get_args(target) for model in _models_in(part)]


def _sources(model: type[BaseModel]) -> tuple:
    field = model.model_fields.get("source")
    return get_args(field.annotation) if field else ()


def _mapping(path: Path) -> dict:
    content = _load(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping, `key: value`, at its top level")
    return content


def _catalogue(path: Path, row_type: Any) -> dict[str, Any]:
    return {name: parse_as(row_type, row, path, prefix=name) for name, row in _mapping(path).items()}


class _EachKeyOnce(yaml.SafeLoader):
    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = key.value, key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"{self.name}: line {line}: {name!r} stands in line {lines[name]} already: join them")
            lines[name] = line
        return node


def _load(path: Path) -> Any:
    """The content of a YAML file. Raises ConfigError where a key stands twice: of two, YAML keeps the last alone."""
    content = read_yaml(path)
    with path.open(encoding="utf-8") as stream:
        yaml.compose(stream, _EachKeyOnce)
    return content


def _require_known(name: str, known, where: str) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"{where}: unknown name {name!r}; {hint}known: {', '.join(known)}")
