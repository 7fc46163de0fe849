"""`gripmoe status`: where every run of a world stands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gripmoe.config.grid import Project
from gripmoe.config.status import cell_status, kept_references


def status(args) -> None:
    """Prints one line per cell that is not done, with the last line of its log; the size of every folder of references;
    and how many cells are done."""
    project = Project(args.config, args.world)
    results = Path("results") / project.results_name
    counts: Counter[str] = Counter()
    for cell in project.cells():
        phase, detail = cell_status(project, results, cell)
        counts[phase] += 1
        if phase != "done":
            print(f"{'.'.join(map(str, cell)):<48} {phase:<9} {detail}")
    for folder, size in kept_references(project, results).items():
        print(f"{folder}: {size:.3g} GB")
    print(", ".join(f"{count} {phase}" for phase, count in counts.items()))
