"""`gripmoe status`: the progress of every run of a world."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gripmoe.cli.options import ConfigFolder, World
from gripmoe.config.grid import Project
from gripmoe.config.status import kept_originals, run_status


def status(*, world: World = "tiny", config: ConfigFolder = Path("workflow/config")) -> None:
    """Show the progress of every run.

    Each run that is not done has a line, with the last line of its log. Further lines give the size of every
    folder with stored outputs of original models, and the numbers of runs.

    \b
    Example:
      gripmoe status --world tiny
    """
    project = Project(config, world)
    results = Path("results") / project.results_name
    counts: Counter[str] = Counter()
    for key in project.run_keys():
        phase, detail = run_status(project, results, key)
        counts[phase] += 1
        if phase != "done":
            print(f"{'.'.join(map(str, key)):<48} {phase:<9} {detail}")
    for folder, size in kept_originals(project, results).items():
        print(f"{folder}: {size:.3g} GB")
    print(", ".join(f"{count} {phase}" for phase, count in counts.items()))
