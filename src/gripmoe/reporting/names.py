"""Labels and colours of models, methods, objectives and metrics in all tables and figures, from names.yaml."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.io.files import read_yaml

FORGOTTEN = 0.27  # of a four-way question, with the slack of the stop rule: forget accuracies below it count alike
NOT_UNLEARNED = ("original", "retrained")
COLLAPSED = {"retain_accuracy": 0.3, "knowmem_retain": 10.0}  # about what guesses reach
MATCHED = {"forget_accuracy", "verbmem", "knowmem_forget"}  # the stop rule makes these equal for all methods
MARKERS = "<sovD^PX*dhp"  # one per colour, repeated if there are more colours


@dataclass(frozen=True)
class MethodStyle:
    label: str
    colour: str = ""
    dashed: bool = False
    note: str = ""
    paper_note: str = ""


@dataclass(frozen=True)
class MetricStyle:
    heading: str
    note: str = ""
    better: str = "higher"
    unit: str = ""


NAMES = read_yaml(Path(__file__).with_name("names.yaml"))
OBJECTIVES: dict[str, str] = NAMES["objectives"]
METHODS = {name: MethodStyle(**row) for name, row in NAMES["methods"].items()}
METRICS = {name: MetricStyle(**row) for name, row in NAMES["metrics"].items()}
MARKS: dict[str, str] = NAMES["marks"]
COLOURS = {name: method.colour for name, method in METHODS.items() if method.colour}
OF_OTHERS = ("#7a5c00", "#c2185b", "#00796b", "#8d6e63", "#5c6bc0", "#ef6c00")  # for methods that the package lacks


SWEPT = re.compile(r"(expert_specific|expert_specific_paper|early|middle|late)_eps_\d+em\d+")


def is_swept(method: str) -> bool:
    """Whether a method is a row of a threshold sweep of the package."""
    return SWEPT.fullmatch(method) is not None


def ordered(names: Iterable[str], known: Iterable[str] = tuple(METHODS)) -> list[str]:
    """Unique names: `known` names in their order (default: methods), then others by name. Rows of a threshold sweep are
    left out, because they have their own table."""
    names, known = {name for name in set(names) if not is_swept(name)}, list(known)
    return [name for name in known if name in names] + sorted(names - set(known))


def objectives_of(table) -> list[str]:
    """The objectives of a table, without "none", in the order of names.yaml, then others by name."""
    return ordered(set(table.objective.unique()) - {NO_OBJECTIVE}, OBJECTIVES)


def method(name: str) -> MethodStyle:
    """Label and look of a method; without an entry, its name. A row of a sweep names its threshold and layers."""
    if name in METHODS or not is_swept(name):
        return METHODS.get(name, MethodStyle(name.replace("_", " ")))
    base, _, threshold = name.partition("_eps_")
    where = METHODS[base].label if base in METHODS else f"Method A, {base} layers"
    return MethodStyle(f"{where}, {threshold.replace('em', 'e-')}")


def method_label(name: str) -> str:
    return method(name).label


def objective_label(objective: str) -> str:
    """Empty for "none"."""
    return "" if objective == NO_OBJECTIVE else OBJECTIVES.get(objective, objective.replace("_", " "))


def model_label(model: str) -> str:
    return _matching("models", model) or model.replace("_", " ")


def benchmark_label(benchmark: str) -> str:
    """The label of a benchmark. Benchmarks with the same label ask the same kind of questions about different facts, so
    their runs may be pooled."""
    return _matching("benchmarks", benchmark) or benchmark


def _matching(kind: str, name: str) -> str | None:
    """The label of the first pattern of names.yaml that matches the whole name."""
    return next((label for pattern, label in NAMES[kind].items() if re.fullmatch(pattern, name)), None)


def metric(name: str) -> MetricStyle:
    return METRICS.get(name, MetricStyle(name.replace("_", " ")))


def line_style(name: str) -> str:
    return "--" if method(name).dashed else "-"


def drawn(methods: Iterable[str]) -> list[str]:
    """The methods of a figure: those that have a colour, in their order, then those that the package lacks."""
    return [name for name in ordered(methods) if name in COLOURS or name not in METHODS]


def colour(name: str) -> str:
    if name not in METHODS and not is_swept(name):
        return OF_OTHERS[zlib.crc32(name.encode()) % len(OF_OTHERS)]
    return method(name).colour or "#444444"


def look_of(name: str, size: float = 3) -> dict:
    """Colour and marker of a method for matplotlib; the marker of a dashed method is hollow."""
    colours = list(dict.fromkeys(COLOURS.values()))
    number = colours.index(colour(name)) if name in COLOURS else zlib.crc32(name.encode()) // len(OF_OTHERS)
    marker = MARKERS[number % len(MARKERS)]
    ground = "white" if method(name).dashed else colour(name)
    return dict(color=colour(name), marker=marker, markersize=size, markeredgewidth=0.6, markerfacecolor=ground)
