"""The files of worlds: where they stand, and what a world has from those that it extends."""

from __future__ import annotations

import re
from pathlib import Path

from gripmoe.config.catalogues import CATALOGUES
from gripmoe.config.reading import NAME, read_mapping
from gripmoe.io.errors import ConfigError


def world_files(folder: Path) -> list[Path]:
    """The files of all worlds of a configuration folder."""
    return sorted(path for path in folder.glob("*.yaml") if path.stem not in CATALOGUES)


def find_world(folder: Path, world: str) -> tuple[str, Path]:
    """Name and file of a world, given by its name in the configuration folder or by the path of a YAML file."""
    path = Path(world) if world.endswith((".yaml", ".yml")) else folder / f"{world}.yaml"
    known = [file.stem for file in world_files(folder)]
    inside = path.resolve() == (folder / path.name).resolve()
    if not known:
        raise ConfigError(f"{folder}: no worlds here; start where the Snakefile is, or name the folder of the worlds")
    if not path.is_file() or (inside and path.stem in CATALOGUES):
        raise ConfigError(
            f"world {world!r}: no world {path}; give one of {', '.join(known)} or the path of a YAML file"
        )
    if not re.fullmatch(NAME, path.stem):
        raise ConfigError(f"{path}: its name is that of folders: small letters, digits and _, and a letter first")
    if path.stem in known and not inside:
        raise ConfigError(
            f"{path}: {path.stem!r} is a world of {folder} too, whose results it would overwrite; rename it"
        )
    return path.stem, path


def world_content(folder: Path, file: Path) -> tuple[dict, list[Path]]:
    """The content of a world file over that of the worlds that it extends; and all their files, its own first. The name
    of the last one is that of the results."""
    content, files = read_mapping(file), [file]
    while "extends" in content:
        extended, where = content.pop("extends"), f"{files[-1]}: extends"
        if not isinstance(extended, str):
            raise ConfigError(f"{where}: {extended!r} is no name of a world; give one, or leave the key out")
        try:
            name, base_file = find_world(folder, extended)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if base_file.resolve() in [each.resolve() for each in files]:
            raise ConfigError(f"{file}: extends: {name!r} extends itself")
        content = {**read_mapping(base_file), **content}
        files.append(base_file)
    return content, files
