"""The state of every run of a world, from its files and logs. Of SLURM's own logs, only why a job was ended is read."""

from __future__ import annotations

from pathlib import Path

from gripmoe.config.grid import Project
from gripmoe.planning.jobs import OUTPUTS

TAIL = 4000  # bytes of a log that hold its last progress bar
SLURM_SAYS = "slurmstepd: error: "
CLUSTER_LOGS = Path("logs/slurm")  # `slurm-logdir` of the profile


def run_status(project: Project, results: Path, key: tuple) -> tuple[str, str]:
    """The next rule of a run, or "done"; and why SLURM ended its job, or the last line of its log."""
    name = list(map(str, key))
    for rule in filter(None, (project.methods[key[3]].rule, "evaluate", "attack")):
        if not (results / f"{OUTPUTS[rule].format(*name)}.json").exists():
            log = results / "logs" / rule / f"{'.'.join(name)}.log"
            ended = ended_by_cluster(CLUSTER_LOGS / f"rule_{rule}" / "_".join(name), log)
            return rule, ended or last_line(log) or "waits"
    return "done", ""


def kept_originals(project: Project, results: Path) -> dict[Path, float]:
    """GB of the folders in which training keeps answers of the original models."""
    pairs = dict.fromkeys(key[:2] for key in project.run_keys())
    folders = [results.joinpath(*pair, "original_answers") for pair in pairs]
    return {f: sum(file.stat().st_size for file in f.iterdir()) / 1e9 for f in folders if f.exists()}


def last_line(log: Path) -> str:
    """The last line of a log, or the last state of its progress bar; empty if there is no log."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def ended_by_cluster(jobs: Path, log: Path) -> str:
    """Why SLURM ended the latest job of a step (time, memory, preemption); empty if the step's own log is newer."""
    latest = max(jobs.glob("*.log"), key=lambda job: job.stat().st_mtime, default=None)
    if latest is None or (log.exists() and log.stat().st_mtime > latest.stat().st_mtime):
        return ""
    said = [line for line in latest.read_text(errors="replace").splitlines() if line.startswith(SLURM_SAYS)]
    return said[-1].removeprefix(SLURM_SAYS) if said else ""
