"""A table is numbers with their texts; `save` writes it as CSV, LaTeX, PDF and PNG. No TeX installation is needed."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from scipy import stats

from gripmoe.files import atomic_path, write_text
from gripmoe.reporting.figures import PAPER_WIDTH, house_style, made_of, save_figure

MISSING = "–"
SHADE = "#f5923e"  # of the darkest ground behind a cell; black reads well on it
NOTE_CHARACTERS = 145  # of a note in the width of a table
TEX_SIGNS = {
    "±": r"$\pm$",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
    "–": "--",
    "%": r"\%",
    "×": r"$\times$",
}


@dataclass
class Cell:
    """One entry: what is shown, and the numbers behind it."""

    text: str
    value: float | None = None
    half_width: float | None = None
    best: bool = False
    shade: float = 0.0  # between 0 and 1, of the ground behind it
    note: str = ""


@dataclass
class Table:
    """`columns` are headings of the measured values, `paper_columns` those of the paper's; `blocks` group rows."""

    columns: list[str]
    paper_columns: list[str]
    blocks: list[tuple[str, list[tuple[str, list[Cell], list[Cell]]]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    label_width: float = 1.5  # inches
    label_size: float = 6.5  # points
    heading: str = "Method"
    data: pd.DataFrame | None = None  # what the CSV holds, if not the cells


def interval(values: pd.Series, level: float = 0.95) -> tuple[float, float | None]:
    """Mean and half-width of an interval over runs: Student's t from three values on. Two values give half their
    range, since their t-interval is wider than any measure here; one value gives none."""
    values = values.dropna()
    if len(values) < 2:
        return float(values.mean()), None
    if len(values) == 2:
        return float(values.mean()), float(values.max() - values.min()) / 2
    return float(values.mean()), float(stats.t.ppf((1 + level) / 2, len(values) - 1) * values.sem())


def with_half_width(mean: float, half_width: float | None, decimals: int) -> str:
    """A mean and, where there is one, half of its interval."""
    text = f"{round(mean, decimals) + 0.0:.{decimals}f}"  # + 0.0: no negative zero
    return text if half_width is None else f"{text} ± {without_zeros(f'{half_width:.{decimals}f}')}"


def as_frame(table: Table) -> pd.DataFrame:
    """One row per table row: measured means and half-widths (or texts), and the paper's values in columns of their
    own; or what the table says of itself. A heading that comes again is named with the one before it."""
    if table.data is not None:
        return table.data
    names, rows = [], []
    for number, name in enumerate(table.columns):
        again = table.columns.count(name) > 1
        names.append(f"{table.columns[_last_unique(table.columns, number)]}: {name}" if again else name)
    for block, entries in table.blocks:
        for label, measured, paper in entries:
            row: dict = {"block": block, "row": label}
            for name, cell in zip(names, measured, strict=True):
                row |= {name: cell.text if cell.value is None and cell.text != MISSING else cell.value}
                row |= {f"{name} ±": cell.half_width}
            for name, cell in zip(table.paper_columns, paper, strict=True):
                row[f"paper: {name}"] = cell.value
            rows.append(row)
    return pd.DataFrame(rows)


def _last_unique(names: list[str], number: int) -> int:
    return max(i for i in range(number + 1) if names.count(names[i]) == 1)


def as_latex(table: Table) -> str:
    """A booktabs tabular; bold is best, italics are the paper's."""
    columns = "l" + "c" * len(table.columns) + ("|" + "c" * len(table.paper_columns) if table.paper_columns else "")
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    lines.append(" & ".join([table.heading, *table.columns, *[f"{c} (paper)" for c in table.paper_columns]]) + r" \\")
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
    for plain, command in TEX_SIGNS.items():
        text = text.replace(plain, command)
    return text


def without_zeros(text: str) -> str:
    """Numbers below one without the zero before their point."""
    return re.sub(r"(?<![\d.])0\.", ".", text)


def as_markdown(table: Table) -> str:
    """A Markdown table per block with its name above, then the notes; bold is best, italics are the paper's."""
    headings = [table.heading, *table.columns, *[f"*{name} (paper)*" for name in table.paper_columns]]
    lines = []
    for block, entries in table.blocks:
        lines += [f"**{block}**", ""] if block else []
        lines += [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
        for label, measured, paper in entries:
            texts = [f"**{cell.text}**" if cell.best else cell.text for cell in measured]
            texts += [f"*{cell.text}*" for cell in paper]
            lines.append(f"| {' | '.join([label.replace('*', chr(92) + '*'), *texts])} |")
        lines.append("")
    return "\n".join([*lines, *(note.replace("*", "\\*") for note in table.notes), ""])


def draw(table: Table) -> plt.Figure:
    """The table as a figure of a paper's text width."""
    notes = [line for note in table.notes for line in textwrap.wrap(note, NOTE_CHARACTERS)]
    num_rows = sum(len(entries) + bool(block) for block, entries in table.blocks)
    line = 0.165  # inches per row
    height = line * (num_rows + bool(table.paper_columns) + 0.8 * len(notes)) + 0.02 * len(table.blocks) + 0.33
    with house_style():
        figure = plt.figure(figsize=(PAPER_WIDTH, height))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, PAPER_WIDTH), ylim=(-height, 0))
        axes.axis("off")
        label_width = table.label_width
        many = len(table.paper_columns) > 4
        of_paper = 0.25 if many or len(table.columns) < 7 else 0.3  # inches of a column
        room = PAPER_WIDTH - label_width - 0.12 - of_paper * len(table.paper_columns)
        measured_width = min(0.4 if many else 0.53, room / len(table.columns))
        if not table.paper_columns:
            measured_width = (PAPER_WIDTH - label_width - 0.05) / len(table.columns)
        paper_x = label_width + measured_width * len(table.columns) + 0.1
        paper_width = (PAPER_WIDTH - paper_x - 0.02) / max(1, len(table.paper_columns))
        measured_x = [label_width + measured_width * (i + 0.5) for i in range(len(table.columns))]
        paper_xs = [paper_x + paper_width * (i + 0.5) for i in range(len(table.paper_columns))]
        y = -0.14
        if table.paper_columns:
            middle = label_width + measured_width * len(table.columns) / 2
            axes.text(middle, y, "measured", ha="center", va="center", style="italic", fontsize=6.5)
            middle = paper_x + paper_width * len(table.paper_columns) / 2
            axes.text(middle, y, "paper", ha="center", va="center", style="italic", fontsize=6.5, color="0.4")
            y -= line
        axes.text(0.04, y, table.heading, ha="left", va="center", fontsize=7)
        crowded = len(table.columns) >= 9 or measured_width < 0.5
        heading_size = 5.4 if crowded else 6.5
        for x, name in zip(measured_x, table.columns, strict=True):
            name = "\n".join(textwrap.wrap(name, 8, break_long_words=False)) if crowded else name
            spacing = {"linespacing": 0.95} if "\n" in name else {}
            axes.text(x, y, name, ha="center", va="center", fontsize=heading_size, **spacing)
        for x, name in zip(paper_xs, table.paper_columns, strict=True):
            size = 6.5 if len(name) < 5 else 4.8
            axes.text(x, y, name, ha="center", va="center", fontsize=size, color="0.4")
        axes.plot([0, PAPER_WIDTH], [-0.035, -0.035], color="black", linewidth=0.9)
        for block, entries in table.blocks:
            axes.plot([0, PAPER_WIDTH], [y - line / 2 - 0.01] * 2, color="black", linewidth=0.4)
            y -= 0.02
            if block:
                y -= line
                axes.text(0.04, y, block, ha="left", va="center", fontsize=7, weight="bold")
            for label, measured, paper in entries:
                y -= line
                axes.text(0.12 if block else 0.04, y, label, ha="left", va="center", fontsize=table.label_size)
                for x, cell in zip(measured_x, measured, strict=True):
                    if cell.shade:
                        corner = x - measured_width / 2, y - line / 2
                        ground = plt.Rectangle(corner, measured_width, line, color=SHADE, alpha=cell.shade, linewidth=0)
                        axes.add_patch(ground)
                    weight = "bold" if cell.best else "normal"
                    text = without_zeros(cell.text).replace(" ± ", "±") if crowded else cell.text
                    size = min(5.2, 15 * measured_width) if crowded else 6
                    axes.text(x, y, text, ha="center", va="center", fontsize=size, weight=weight)
                for x, cell in zip(paper_xs, paper, strict=True):
                    size = 5.2 if many else 6
                    axes.text(x, y, cell.text, ha="center", va="center", fontsize=size, color="0.4", style="italic")
        if table.paper_columns:
            axes.plot([paper_x - 0.04] * 2, [-0.06, y - line / 2], color="0.6", linewidth=0.4)
        y -= line / 2 + 0.02
        axes.plot([0, PAPER_WIDTH], [y, y], color="black", linewidth=0.9)
        for note in notes:
            y -= line * 0.8
            axes.text(0.04, y, note, ha="left", va="center", fontsize=5.2, color="0.25")
    return figure


def save(table: Table, stem: Path, runs: Path | None = None) -> None:
    """Writes .csv, .tex, .pdf and .png beside `stem`, whatever its suffix; all but .csv name the source, `runs`."""
    with atomic_path(stem.with_suffix(".csv")) as temporary:
        as_frame(table).to_csv(temporary, index=False)
    write_text(stem.with_suffix(".tex"), f"% {made_of(runs)}\n{as_latex(table)}")
    save_figure(draw(table), stem, runs)
