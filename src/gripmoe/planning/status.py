"""The state of every run of a world, from its files and logs. Of SLURM's own logs, only why a job was ended is read."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from gripmoe.config.fingerprint import fingerprint_now
from gripmoe.config.project import Project
from gripmoe.config.world import RunKey
from gripmoe.io.files import read_json, read_yaml
from gripmoe.planning.jobs import Parts, is_done, own_rules, shared_steps

TAIL = 4000  # bytes of a log that hold its last progress bar
NOISE = re.compile(r"\s*(W\d{4} |\[transformers\])|.*Warning:")  # warnings of torch, transformers and Python
SLURM_SAYS = "slurmstepd: error: "
CLUSTER_LOGS = Path("logs/slurm")  # `slurm-logdir` of the profile


def run_status(project: Project, results: Path, key: RunKey) -> tuple[str, str]:
    """The next rule of a run; and why SLURM ended its job, or the last line of its log. A run that has not begun waits,
    perhaps for a step that it shares with others. A run without a next rule is "outdated" by `changes`, "diverged",
    "untrained" if the model met the forget target before training, "missed" if it took all steps without meeting the
    target, or "done"."""
    for rule in own_rules(project, key):
        if not is_done(results, rule, key):
            return rule, _said(results, rule, key) or _awaited(project, results, key)
    changed = "; ".join(changes(project, results, key))
    if changed:
        return "outdated", changed
    checkpoint = results / key.folder / "checkpoint.json"
    outcome = read_json(checkpoint) if checkpoint.exists() else {}
    if outcome.get("status") == "diverged":
        return "diverged", f"at step {outcome['steps']}"
    if outcome.get("status") == "reached" and outcome.get("steps") == 0:
        return "untrained", "the model met the forget target before training"
    history = checkpoint.with_name("history.json")
    if outcome.get("status") == "not_reached" and history.exists():
        last, checks = read_json(history)[-1], project.run(*key).training.checks_to_stop
        asked = [f"{name} is {last[name]:.3f}, the target {target:g}" for name, target in outcome["targets"].items()]
        in_a_row = f" (met at {checks} checks in a row)" * (checks > 1)
        return "missed", f"all {outcome['steps']} steps taken: {'; '.join(asked)}{in_a_row}"
    return "done", ""


def changes(project: Project, results: Path, key: RunKey) -> list[str]:
    """The settings of a run, of its metrics and attacks, and the code of its steps, that have changed since they ran.
    Files of one's own are not compared; Snakemake knows them."""
    folder = results / key.folder
    if not (folder / "run.yaml").exists():
        return []
    settings = _changed(read_yaml(folder / "run.yaml"), project.run(*key).model_dump(mode="json"))
    steps = [read_json(file) for file in sorted(folder.glob("*.provenance.json"))]
    flags = {"--benchmark": project.benchmarks[key.benchmark].measured, "--settings": project.world.relearning}
    for step in steps:
        for flag, given in flags.items():
            before, now = _given(step.get("command", ""), flag), given.model_dump(mode="json") if given else {}
            if before:  # a step is not given the settings that it does not read
                now = {name: now[name] for name in before if name in now}
            settings += _changed(before, now) if before is not None else []
    changed = [step["step"] for step in steps if "step" in step and fingerprint_now(step["step"]) != step["code"]]
    return list(dict.fromkeys(settings)) + [f"the code of {step} has changed" for step in changed]


def _given(command: str, flag: str) -> dict[str, Any] | None:
    """The settings that a recorded command was given by a flag; None if it was not given this flag."""
    words = shlex.split(command)
    return (json.loads(words[words.index(flag) + 1]) or {}) if flag in words else None


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    before, now = _flat(before), _flat(now)
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return [f"{name} is {now.get(name)}, was {before.get(name)}" for name in names]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    flat = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _said(results: Path, rule: str, parts: Parts) -> str:
    name = list(map(str, parts))
    log = results / "logs" / rule / f"{'.'.join(name)}.log"
    return ended_by_cluster(CLUSTER_LOGS / f"rule_{rule}" / "_".join(name), log) or last_line(log)


def _awaited(project: Project, results: Path, key: RunKey) -> str:
    for rule, parts in shared_steps(project, key):
        if not is_done(results, rule, parts) and (said := _said(results, rule, parts)):
            return f"waits for {rule} of {'.'.join(parts)}: {said}"
    return "waits"


def kept_originals(project: Project, results: Path) -> dict[Path, float]:
    """GB of the folders in which training keeps answers of the original models."""
    pairs = dict.fromkeys((key.model, key.benchmark) for key in project.run_keys())
    folders = [results.joinpath(*pair, "original_answers") for pair in pairs]
    return {f: sum(map(_bytes, f.rglob("*"))) / 1e9 for f in folders if f.exists()}


def _bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # a run has just renamed it
        return 0


def last_line(log: Path) -> str:
    """The last line of a log, or the last state of its progress bar; empty if there is no log. A warning counts
    only if the log holds nothing else."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    said = [line for before, line in pairwise(["", *lines]) if not _is_noise(before, line)]
    return (said or lines or [""])[-1].strip()


def _is_noise(before: str, line: str) -> bool:
    """Whether a line is a warning, or the line of code that Python shows below one."""
    return bool(NOISE.match(line) or ("Warning:" in before and line.startswith("  ")))


def ended_by_cluster(jobs: Path, log: Path) -> str:
    """Why SLURM ended the latest job of a step (time, memory, preemption); empty if the step's own log is newer."""
    latest = max(jobs.glob("*.log"), key=lambda job: job.stat().st_mtime, default=None)
    if latest is None or (log.exists() and log.stat().st_mtime > latest.stat().st_mtime):
        return ""
    said = [line for line in latest.read_text(errors="replace").splitlines() if line.startswith(SLURM_SAYS)]
    return said[-1].removeprefix(SLURM_SAYS) if said else ""
