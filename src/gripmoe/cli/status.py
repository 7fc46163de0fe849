"""`gripmoe status`: the progress of every run of a world."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gripmoe.cli.options import ConfigFolder, World
from gripmoe.config.project import Project
from gripmoe.planning.status import kept_originals, run_status


def status(*, world: World = "tiny", config: ConfigFolder = Path("workflow/config")) -> None:
    """Show the progress of every run.

    Each run that is not done has a line, with its next rule and the last line of that rule's log, or of the log of
    the shared step that the run waits for. An outdated run has a line with the settings and steps that have changed
    since it ran; changed files of your own are seen by `snakemake -n` alone. A run has a line too if its training
    diverged, if it took all steps without meeting the forget target, or if its model met the target before training.
    Further lines give the size of every folder with stored outputs of original models, and the numbers of runs.

    \b
    Example:
      gripmoe status --world tiny
    """
    project = Project(config, world)
    counts: Counter[str] = Counter()
    for key in project.run_keys():
        rule, detail = run_status(project, project.results, key)
        counts[rule] += 1
        if rule != "done":
            print(f"{key!s:<48} {rule:<9} {detail}")
    for folder, size in kept_originals(project, project.results).items():
        print(f"{folder}: {size:.3g} GB")
    print(", ".join(f"{count} {rule}" for rule, count in counts.items()))
