"""A table is numbers with their texts; `save` writes it as CSV, LaTeX, PDF and PNG. No TeX installation is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties
from scipy import stats

from gripmoe.files import atomic_path, write_text
from gripmoe.reporting.figures import PAPER_WIDTH, house_style, made_of, save_figure

MISSING = "–"
SHADE = "#f5923e"  # of the darkest ground behind a cell; black reads well on it
CELL_SIZE, HALF_SIZE, HEADING_SIZE, NOTE_SIZE = 6.2, 5.2, 6.2, 5.8  # points, of text that need not shrink
LINE, HEADING_LINE, NOTE_LINE = 0.165, 0.105, 0.115  # inches
LEAST_GAP = 0.07  # inches between the texts of two columns
RULE_GAP = 0.1  # inches before the paper's columns
MINUS = re.compile(r"(?<![\w.])-(?=[.\d])")
RENDERER = RendererAgg(8, 8, 720)  # measures text; finely, since hinting rounds to pixels
TEX_SIGNS = {
    **{sign: rf"\{sign}" for sign in "%&#_{}$"},
    **{sign: f"${sign}$" for sign in "<>"},
    "\\": r"\textbackslash{}",
    "~": r"$\sim$",
    "^": r"\^{}",
    "±": r"$\pm$",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
    "§": r"\S{}",
    "¶": r"\P{}",
    "–": "--",
    "×": r"$\times$",
    "Δ": r"$\Delta$",
    "µ": r"$\mu$",
    "−": "$-$",
}


@dataclass
class Cell:
    """One entry: what is shown, and the numbers behind it."""

    text: str
    value: float | None = None
    half_width: float | None = None
    best: bool = False
    shade: float = 0.0  # between 0 and 1, of the ground behind it
    colour: str = "black"
    reason: str = ""  # why nothing can stand here


@dataclass
class Table:
    """`columns` are headings of the measured values, `paper_columns` those of the paper's; `blocks` group rows."""

    columns: list[str]
    paper_columns: list[str]
    blocks: list[tuple[str, list[tuple[str, list[Cell], list[Cell]]]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    label_width: float = 1.9  # inches at most
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


def as_tex(text: str) -> str:
    """Plain text as LaTeX that pdflatex takes: characters that mean something to it escaped, signs as commands."""
    text = "".join(TEX_SIGNS.get(sign, sign) for sign in text)
    return MINUS.sub("$-$", text)


def as_latex(table: Table) -> str:
    """A booktabs tabular with its notes below; bold is best, italics are the paper's, grounds are as dark as drawn."""
    shaded = any(cell.shade for _, entries in table.blocks for _, measured, _ in entries for cell in measured)
    columns = "l" + "c" * len(table.columns) + ("|" + "c" * len(table.paper_columns) if table.paper_columns else "")
    lines = [r"% \usepackage{booktabs}" + r", \usepackage[table]{xcolor}" * shaded]
    lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    headings = [table.heading, *table.columns, *[f"{name} (paper)" for name in table.paper_columns]]
    lines.append(" & ".join(map(as_tex, headings)) + r" \\")
    for block, entries in table.blocks:
        lines.append(r"\midrule")
        if block:
            lines.append(rf"\multicolumn{{{len(headings)}}}{{l}}{{\textit{{{as_tex(block)}}}}} \\")
        for label, measured, paper in entries:
            texts = [_tex_cell(cell) for cell in measured] + [rf"\textit{{{as_tex(cell.text)}}}" for cell in paper]
            lines.append(" & ".join([as_tex(label), *texts]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip{{\footnotesize {as_tex(note)}\par}}" for note in table.notes]
    return "\n".join(lines) + "\n"


def _tex_cell(cell: Cell) -> str:
    text = rf"\textbf{{{as_tex(cell.text)}}}" if cell.best else as_tex(cell.text)
    if not cell.shade:
        return text
    ground = (round(255 + cell.shade * (part - 255)) for part in (int(SHADE[i : i + 2], 16) for i in (1, 3, 5)))
    return rf"\cellcolor[HTML]{{{''.join(f'{part:02X}' for part in ground)}}}{text}"


def without_zeros(text: str) -> str:
    """Fractions below one, which have two decimals or more, without the zero before their point; not per cents."""
    return re.sub(r"(?<![\d.])0\.(?=\d\d)", ".", text)


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


@dataclass(frozen=True)
class _Layout:
    """Where columns lie, in inches: the width of labels, the right edges of measured columns and of the paper's. If
    `stacked`, half-widths stand below their means. `scale` is that of the text in cells and headings."""

    label: float
    measured: list[float]
    paper: list[float]
    stacked: bool
    scale: float


@lru_cache(maxsize=10_000)
def text_width(text: str, size: float, weight: str = "normal", style: str = "normal") -> float:
    """Inches of one line, at `size` points."""
    with house_style():
        font = FontProperties(size=size, weight=weight, style=style)
        return RENDERER.get_text_width_height_descent(text, font, False)[0] / RENDERER.dpi


def wrapped(text: str, size: float, width: float, weight: str = "normal") -> list[str]:
    """Lines of at most so many inches, broken between words; a longer word has a line of its own."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and text_width(f"{lines[-1]} {word}", size, weight) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _heading(name: str) -> str:
    return name.replace("+ ", "+\u00a0")  # the sign stays with its word


def _lines_of(cell: Cell, stacked: bool) -> list[str]:
    """A cell's text as it is drawn, with minus signs; if `stacked`, its half-width in a line of its own."""
    text = MINUS.sub("−", without_zeros(cell.text) if stacked else cell.text)
    mean, sign, half = text.partition(" ± ")
    return [mean, f"±{half}"] if sign and stacked else [text]


def _width_of(cell: Cell, stacked: bool, style: str = "normal") -> float:
    weight = "bold" if cell.best else "normal"
    sizes = zip(_lines_of(cell, stacked), (CELL_SIZE, HALF_SIZE), strict=False)
    return max(text_width(line, size, weight, style) for line, size in sizes)


def _layout(table: Table) -> _Layout:
    """Columns as wide as their longest text, with equal gaps; where there is no room for that, half-widths go below
    their means, and if need be the text shrinks."""
    rows = [row for _, entries in table.blocks for row in entries]
    labels = [text_width(label, table.label_size) for label, _, _ in rows] or [0.0]
    label = min(max(*labels, text_width(table.heading, HEADING_SIZE)) + 0.2, table.label_width)
    room = PAPER_WIDTH - label - (RULE_GAP if table.paper_columns else 0)
    for stacked in (False, True):
        widths = []
        for names, side, style in ((table.columns, 1, "normal"), (table.paper_columns, 2, "italic")):
            for number, name in enumerate(names):
                longest_word = max(text_width(word, HEADING_SIZE) for word in _heading(name).split(" "))
                cells = [_width_of(row[side][number], stacked, style) for row in rows]
                widths.append(max([longest_word, *cells]))
        gap = (room - sum(widths)) / len(widths)
        if gap >= LEAST_GAP:
            break
    scale = min(1.0, (room - LEAST_GAP * len(widths)) / sum(widths))
    gap = (room - scale * sum(widths)) / len(widths)
    if table.paper_columns:  # those of few characters need not be far apart
        gap = min(gap, 0.3)
    widths = [scale * width + gap for width in widths]
    num = len(table.columns)
    return _Layout(label, widths[:num], widths[num:], stacked, scale)


def draw(table: Table) -> plt.Figure:
    """The table as a figure of a paper's text width."""
    layout = _layout(table)
    cell_size, half_size, heading_size = (layout.scale * size for size in (CELL_SIZE, HALF_SIZE, HEADING_SIZE))
    lefts = list(accumulate(layout.measured, initial=layout.label))
    paper_x = lefts[-1] + RULE_GAP
    paper_lefts = list(accumulate(layout.paper, initial=paper_x))
    right_end = PAPER_WIDTH
    headings = [
        (left + width / 2, wrapped(_heading(name), heading_size, width - LEAST_GAP), colour)
        for names, starts, widths, colour in (
            (table.columns, lefts, layout.measured, "black"),
            (table.paper_columns, paper_lefts, layout.paper, "0.4"),
        )
        for name, left, width in zip(names, starts, widths, strict=False)
    ]
    heading_lines = max([len(lines) for _, lines, _ in headings], default=1)
    notes = [line for note in table.notes for line in wrapped(note, NOTE_SIZE, 0.95 * PAPER_WIDTH)]
    rows = []  # of each block: its name, and lines of the label, cells, the paper's cells and height of each row
    for block, entries in table.blocks:
        measured_rows = []
        for label, measured, paper in entries:
            lines = wrapped(label, table.label_size, layout.label - 0.16)
            tallest = max([len(_lines_of(cell, layout.stacked)) for cell in measured], default=1)
            measured_rows.append((lines, measured, paper, LINE * (1.0, 1.4)[max(len(lines), tallest) > 1]))
        rows.append((block, measured_rows))
    top = 0.06 + (LINE if table.paper_columns else 0) + HEADING_LINE * heading_lines
    body = sum(0.02 + LINE * bool(block) + sum(height for *_, height in of_block) for block, of_block in rows)
    height = top + 0.03 + body + 0.06 + NOTE_LINE * len(notes) + 0.04
    with house_style():
        figure = plt.figure(figsize=(PAPER_WIDTH, height))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, PAPER_WIDTH), ylim=(-height, 0))
        axes.axis("off")

        def rule(y: float, linewidth: float) -> None:
            axes.plot([0, right_end], [y, y], color="black", linewidth=linewidth)

        def write(x: float, y: float, text: str, **look) -> None:
            axes.text(x, y, text, va="center", **{"ha": "center", "fontsize": cell_size} | look)

        rule(-0.03, 0.9)
        if table.paper_columns:
            for text, left, right, colour in (
                ("measured", layout.label, lefts[-1], "black"),
                ("paper", paper_x, paper_lefts[-1], "0.4"),
            ):
                write((left + right) / 2, -0.06 - LINE / 2, text, style="italic", fontsize=6.5, color=colour)
        y = -top + HEADING_LINE * heading_lines / 2
        write(0.04, y, table.heading, ha="left", fontsize=7)
        for x, lines, colour in headings:
            for number, line in enumerate(lines):
                at = y + HEADING_LINE * ((len(lines) - 1) / 2 - number)
                write(x, at, line, fontsize=heading_size, color=colour)
        y = -top - 0.03
        for block, of_block in rows:
            rule(y, 0.4)
            y -= 0.02
            if block:
                write(0.04, y - LINE / 2, block, ha="left", fontsize=7, weight="bold")
                y -= LINE
            block_top = y
            for lines, measured, paper, row_height in of_block:
                middle = y - row_height / 2
                for number, line in enumerate(lines):
                    at = middle + 0.105 * ((len(lines) - 1) / 2 - number)
                    write(0.12 if block else 0.04, at, line, ha="left", fontsize=table.label_size)
                for left, width, cell in zip(lefts, layout.measured, measured, strict=False):
                    if cell.shade:
                        size = width, row_height
                        ground = dict(color=SHADE, alpha=cell.shade, linewidth=0)
                        axes.add_patch(plt.Rectangle((left, y - row_height), *size, **ground))
                    texts = _lines_of(cell, layout.stacked)
                    for number, (text, size) in enumerate(zip(texts, (cell_size, half_size), strict=False)):
                        at = middle + (0.052 - 0.1 * number) * (len(texts) > 1)
                        weight = "bold" if cell.best and number == 0 else "normal"
                        write(left + width / 2, at, text, fontsize=size, weight=weight, color=cell.colour)
                for left, width, cell in zip(paper_lefts, layout.paper, paper, strict=False):
                    write(left + width / 2, middle, *_lines_of(cell, False), color="0.4", style="italic")
                y -= row_height
            if layout.stacked:
                axes.vlines(lefts[:-1], y, block_top, color="0.8", linewidth=0.3)
        if table.paper_columns:
            axes.plot([paper_x - RULE_GAP / 2] * 2, [-0.06, y], color="0.6", linewidth=0.4)
        y -= 0.03
        rule(y, 0.9)
        y -= 0.03
        for note in notes:
            y -= NOTE_LINE
            write(0.04, y + NOTE_LINE / 2, note, ha="left", fontsize=NOTE_SIZE, color="0.25")
    return figure


def save(table: Table, stem: Path, *tables: Path) -> None:
    """Writes .csv, .tex, .pdf and .png beside `stem`, whatever its suffix; all but .csv name what they were made of,
    the `tables` that were read first."""
    with atomic_path(stem.with_suffix(".csv")) as temporary:
        as_frame(table).to_csv(temporary, index=False)
    write_text(stem.with_suffix(".tex"), f"% {made_of(tables)}\n{as_latex(table)}")
    save_figure(draw(table), stem, *tables)
