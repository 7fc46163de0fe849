"""`gripmoe pin`: the revisions of a world's models and data on the hub."""

from __future__ import annotations

from pathlib import Path

import yaml

from gripmoe.cli.options import ConfigFolder, World
from gripmoe.config.project import Project
from gripmoe.io.errors import ConfigError
from gripmoe.planning.revisions import unpinned


def pin(*, world: World = "tiny", config: ConfigFolder = Path("workflow/config")) -> None:
    """Show which revisions of models and data to write into models.yaml and benchmarks.yaml.

    The command asks the hub for the current commit of each model and data set that the world names without a revision.

    \b
    Example:
      gripmoe pin --world paper
    """
    from huggingface_hub import HfApi

    api = HfApi()
    missing: dict[str, dict] = {}
    for file, path, kind, repository in unpinned(Project(config, world)):
        try:
            commit = api.repo_info(repository, repo_type=kind).sha
        except Exception as error:  # offline, gated or unknown: the hub's library has a different error for each
            said = str(error).partition("\n")[0]
            raise ConfigError(
                f"{file}: {'.'.join(path)}: the hub does not say which commit {repository} is at "
                f"({type(error).__name__}: {said}). Run this where there is internet, without "
                "HF_HUB_OFFLINE, and with `hf auth login` for what is gated; or name a local folder."
            ) from error
        entry = missing.setdefault(file, {})
        for key in path[:-1]:
            entry = entry.setdefault(key, {})
        entry[path[-1]] = commit
    for file, entries in missing.items():
        print(f"# add to {config / file}\n{yaml.safe_dump(entries, sort_keys=False, width=120)}")
    if not missing:
        print("Everything that this world reads from the hub has a revision.")
