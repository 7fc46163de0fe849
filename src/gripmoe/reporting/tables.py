"""Tables of the paper: measured cells with intervals, the paper's values beside them, never mixed.

A `Table` is numbers with their texts; `save` writes it as CSV, LaTeX, PDF and PNG. No TeX installation is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import yaml
from scipy import stats

from gripmoe.files import atomic_path, write_text
from gripmoe.reporting import labels
from gripmoe.reporting.figures import PAPER_WIDTH, house_style, save_figure

MISSING = "–"


@dataclass
class Cell:
    """One entry: what is shown, and the numbers behind it."""

    text: str
    value: float | None = None
    half_width: float | None = None
    best: bool = False
    note: str = ""


@dataclass
class Table:
    """`columns` are headings of the measured values, `paper_columns` those of the paper's; `blocks` group rows."""

    columns: list[str]
    paper_columns: list[str]
    blocks: list[tuple[str, list[tuple[str, list[Cell], list[Cell]]]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def interval(values: pd.Series, level: float = 0.95) -> tuple[float, float | None]:
    """Mean and half-width of an interval over runs: Student's t from three values on. Two values give half their
    range, since their t-interval is wider than any measure here; one value gives none."""
    values = values.dropna()
    if len(values) < 2:
        return float(values.mean()), None
    if len(values) == 2:
        return float(values.mean()), float(values.max() - values.min()) / 2
    return float(values.mean()), float(stats.t.ppf((1 + level) / 2, len(values) - 1) * values.sem())


def paper_values(table: str) -> dict[tuple[str, str, str], float]:
    """The paper's numbers of a table by (objective, method, metric)."""
    text = (resources.files("gripmoe.reporting") / "paper_values.yaml").read_text(encoding="utf-8")
    entry = yaml.safe_load(text)[table]
    return {
        (row["objective"], row["method"], metric): value
        for row in entry["rows"]
        for metric, value in zip(entry["columns"], row["values"], strict=True)
    }


def _measured(runs: pd.DataFrame, metric: str) -> Cell:
    values = runs.loc[runs.metric == metric, "value"]
    if values.dropna().empty:
        return Cell(MISSING)
    mean, half_width = interval(values)
    text = f"{round(mean, 2) + 0.0:.2f}"  # + 0.0: no negative zero
    if half_width is not None:
        text += f" ± {half_width:.2f}".replace("± 0.", "± .")
    return Cell(text, mean, half_width)


def main_results(runs: pd.DataFrame, methods: list[str] | None = None) -> Table:
    """Table 1: forget accuracy, retain accuracy and routing stability of every method under every objective.

    The best value of a block is marked among the runs that reached the forget target; a run that did not reach it, or
    diverged, carries a note, and its values are those of where it ended.
    """
    metrics = [
        "forget_accuracy",
        "retain_accuracy",
        "routing_stability",
        "routing_stability_router_only",
        "routing_stability_representation_only",
        "recovery_rate",
    ]
    published = paper_values("main_results")
    methods = methods or [m for m in labels.METHODS if m in set(runs.method)]
    methods += [m for m in runs.method.unique() if m not in methods]
    table = Table([labels.METRICS[m] for m in metrics], [labels.METRICS[m] for m in metrics[:3]])
    for objective in ("none", *[o for o in labels.OBJECTIVES if o != "none"]):
        block = []
        for method in methods:
            cells = runs[(runs.objective == objective) & (runs.method == method)]
            if cells.empty:
                continue
            measured = [_measured(cells, metric) for metric in metrics]
            paper = [published.get((objective, method, metric)) for metric in metrics[:3]]
            shown = [Cell(MISSING) if value is None else Cell(f"{value:.2f}", value) for value in paper]
            label = labels.method_label(method) + _marks(cells)
            block.append((label, measured, shown))
        if block:
            if objective != "none":
                _mark_best(block, metrics)
            table.blocks.append((labels.OBJECTIVES[objective], block))
    seeds = runs.loc[runs.objective != "none", "seed"].nunique()
    instances = f"{runs.model.nunique()} base model{'s' if runs.model.nunique() > 1 else ''}"
    runs_per_cell = seeds * runs.model.nunique()
    spread = "half the range" if runs_per_cell == 2 else "95 % t-interval"
    table.notes = [
        f"Mean over {seeds} unlearning seeds, {instances}, ± {spread}; test questions, held-out retain tokens.",
        "FA forget, RA retain accuracy; RS routing stability, and with only the router or only its inputs changed;",
        "recovery: FA under the original expert sets minus FA. Bold: best in its block among runs that forgot enough.",
        "* has not forgotten: target missed on dev, or exceeded by .05 on test; † diverged; ‡ corrected at the end.",
        "Right: the paper's own values (Qwen3-30B-A3B); – not measured here, or not in the paper.",
    ]
    return table


FORGET_SLACK = 0.05  # from the dev split, on which runs stop, to the test split


def _marks(cells: pd.DataFrame) -> str:
    """The notes of a row: † diverged; * not forgotten, on the way or after a correction; ‡ corrected afterwards."""

    def values(metric: str) -> pd.Series:
        return cells.loc[cells.metric == metric, "value"]

    above_target = values("forget_accuracy").mean() > values("forget_target").max() + FORGET_SLACK
    marks = ""
    if (values("diverged") == 1).any():
        marks += " †"
    elif (values("reached") == 0).any() or (above_target and not values("reached").empty):
        marks += " *"
    return marks + (" ‡" if (values("corrected_after") == 1).any() else "")


def _mark_best(block: list, metrics: list[str]) -> None:
    """Marks the best value per column; rows with a note * or † have not forgotten as much and do not compete. Neither
    does forget accuracy, which is matched by design."""
    for column, metric in enumerate(metrics):
        if metric == "forget_accuracy":
            continue
        competing = [cells[column] for label, cells, _ in block if not {"*", "†"} & set(label)]
        competing = [cell for cell in competing if cell.value is not None]
        if len(competing) < 2:
            continue
        if len({round(cell.value, 2) for cell in competing}) == 1:
            continue  # nothing to choose
        best = (min if metric in labels.LOWER_IS_BETTER else max)(round(cell.value, 2) for cell in competing)
        for cell in competing:
            cell.best = round(cell.value, 2) == best


def as_frame(table: Table) -> pd.DataFrame:
    """One row per table row: measured means and half-widths, and the paper's values in columns of their own."""
    rows = []
    for block, entries in table.blocks:
        for label, measured, paper in entries:
            row: dict = {"block": block, "row": label}
            for name, cell in zip(table.columns, measured, strict=True):
                row |= {name: cell.value, f"{name} ±": cell.half_width}
            for name, cell in zip(table.paper_columns, paper, strict=True):
                row[f"paper: {name}"] = cell.value
            rows.append(row)
    return pd.DataFrame(rows)


def as_latex(table: Table) -> str:
    """A booktabs tabular; bold is best, italics are the paper's."""
    columns = "l" + "c" * len(table.columns) + "|" + "c" * len(table.paper_columns)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    lines.append(" & ".join(["Method", *table.columns, *[f"{c} (paper)" for c in table.paper_columns]]) + r" \\")
    for block, entries in table.blocks:
        lines.append(r"\midrule")
        if block:
            lines.append(
                rf"\multicolumn{{{1 + len(table.columns) + len(table.paper_columns)}}}{{l}}{{\textit{{{block}}}}} \\"
            )
        for label, measured, paper in entries:
            texts = [rf"\textbf{{{c.text}}}" if c.best else c.text for c in measured]
            texts += [rf"\textit{{{c.text}}}" for c in paper]
            lines.append(" & ".join([label, *texts]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    text = "\n".join(lines) + "\n"
    for plain, command in (("±", r"$\pm$"), ("†", r"$\dagger$"), ("‡", r"$\ddagger$"), ("–", "--"), ("%", r"\%")):
        text = text.replace(plain, command)
    return text


def draw(table: Table) -> plt.Figure:
    """The table as a figure of a paper's text width."""
    num_rows = sum(len(entries) + bool(block) for block, entries in table.blocks)
    line = 0.165  # inches per row
    height = line * (num_rows + 2.6 + 0.8 * len(table.notes)) + 0.25
    with house_style():
        figure = plt.figure(figsize=(PAPER_WIDTH, height))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, PAPER_WIDTH), ylim=(-height, 0))
        axes.axis("off")
        label_width = 1.5
        measured_width = 0.53
        paper_x = label_width + measured_width * len(table.columns) + 0.1
        paper_width = (PAPER_WIDTH - paper_x - 0.02) / max(1, len(table.paper_columns))
        measured_x = [label_width + measured_width * (i + 0.5) for i in range(len(table.columns))]
        paper_xs = [paper_x + paper_width * (i + 0.5) for i in range(len(table.paper_columns))]
        y = -0.14
        middle = label_width + measured_width * len(table.columns) / 2
        axes.text(middle, y, "measured", ha="center", va="center", style="italic", fontsize=6.5)
        middle = paper_x + paper_width * len(table.paper_columns) / 2
        axes.text(middle, y, "paper", ha="center", va="center", style="italic", fontsize=6.5, color="0.4")
        y -= line
        axes.text(0.04, y, "Method", ha="left", va="center", fontsize=7)
        for x, name in zip(measured_x, table.columns, strict=True):
            axes.text(x, y, name, ha="center", va="center", fontsize=6.5)
        for x, name in zip(paper_xs, table.paper_columns, strict=True):
            axes.text(x, y, name, ha="center", va="center", fontsize=6.5, color="0.4")
        axes.plot([0, PAPER_WIDTH], [-0.035, -0.035], color="black", linewidth=0.9)
        for block, entries in table.blocks:
            axes.plot([0, PAPER_WIDTH], [y - line / 2 - 0.01] * 2, color="black", linewidth=0.4)
            y -= 0.02
            if block:
                y -= line
                axes.text(0.04, y, block, ha="left", va="center", fontsize=7, weight="bold")
            for label, measured, paper in entries:
                y -= line
                axes.text(0.12 if block else 0.04, y, label, ha="left", va="center", fontsize=6.5)
                for x, cell in zip(measured_x, measured, strict=True):
                    weight = "bold" if cell.best else "normal"
                    axes.text(x, y, cell.text, ha="center", va="center", fontsize=6, weight=weight)
                for x, cell in zip(paper_xs, paper, strict=True):
                    axes.text(x, y, cell.text, ha="center", va="center", fontsize=6, color="0.4", style="italic")
        axes.plot([paper_x - 0.04] * 2, [-0.06, y - line / 2], color="0.6", linewidth=0.4)
        y -= line / 2 + 0.02
        axes.plot([0, PAPER_WIDTH], [y, y], color="black", linewidth=0.9)
        for note in table.notes:
            y -= line * 0.8
            axes.text(0.04, y, note, ha="left", va="center", fontsize=5.2, color="0.25")
    return figure


def save(table: Table, stem: Path) -> None:
    """Writes .csv, .tex, .pdf and .png beside `stem`, whatever its suffix."""
    with atomic_path(stem.with_suffix(".csv")) as temporary:
        as_frame(table).to_csv(temporary, index=False)
    write_text(stem.with_suffix(".tex"), as_latex(table))
    save_figure(draw(table), stem)
