"""What a world reads from the hub without a revision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gripmoe.config.benchmarks import PublishedData, PublishedNews
from gripmoe.config.models import PublishedModel
from gripmoe.config.project import Project


def unpinned(project: Project) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Models and data sets that a world names by hub id without a revision: file, keys to the revision, kind and id."""
    for name in project.models_needed:
        model = project.models[name]
        if isinstance(model, PublishedModel) and model.revision is None and not Path(model.id).exists():
            yield "models.yaml", (name, "revision"), "model", model.id
    for name in project.world.benchmarks:
        data = project.benchmarks[name].data
        if isinstance(data, PublishedNews) and data.revision is None and not Path(data.repository).exists():
            yield "benchmarks.yaml", (name, "data", "revision"), "dataset", data.repository
        elif isinstance(data, PublishedData):
            for repository in data.sources:
                if repository not in data.revisions and not Path(repository).exists():
                    yield "benchmarks.yaml", (name, "data", "revisions", repository), "dataset", repository
