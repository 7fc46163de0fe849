"""Tables of numbers with their texts. `save` writes CSV, LaTeX, HTML and Markdown with pandas."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import pandas as pd
from pandas.io.formats.style import Styler

from gripmoe.io.files import write_text
from gripmoe.reporting.sources import made_of

MISSING = "–"
SHADE = (245, 146, 62)  # RGB of the darkest background, on which black text is readable
ITALIC = {"font-style": "italic"}
HTML_STYLES = [
    {"selector": "", "props": "border-collapse: collapse; font: 13px sans-serif"},
    {"selector": "th, td", "props": "padding: 2px 8px; text-align: center"},
    {"selector": "thead", "props": "border-bottom: 1px solid"},
    {"selector": ".col0", "props": "text-align: left"},
    {"selector": "td:not(.col0)", "props": "white-space: nowrap"},
    {"selector": "caption", "props": "caption-side: bottom; text-align: left; padding: 8px"},
]
MINUS = re.compile(r"(?<![\w.])-(?=[.\d])")
TEX_SIGNS = str.maketrans(
    {sign: rf"\{sign}" for sign in "%&#_{}$"}
    | {sign: f"${sign}$" for sign in "<>"}
    | {"\\": r"\textbackslash{}", "~": r"$\sim$", "^": r"\^{}", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--"}
    | {"≤": r"$\leq$", "≥": r"$\geq$"}
    | {"†": r"$\dagger$", "‡": r"$\ddagger$", "§": r"\S{}", "¶": r"\P{}", "Δ": r"$\Delta$", "µ": r"$\mu$"}
)


@dataclass
class Cell:
    """One entry: what is shown, and the numbers behind it."""

    text: str
    value: float | None = None
    half_width: float | None = None
    best: bool = False
    shade: float = 0.0  # of the background, between 0 and 1
    colour: str = ""  # of the text, as "#0072b2"
    reason: str = ""  # why the cell is empty

    @property
    def css(self) -> str:
        ground = "".join(f"{round(255 + self.shade * (part - 255)):02X}" for part in SHADE)
        looks = [f"background-color: #{ground}"] * bool(self.shade) + ["font-weight: bold"] * self.best
        return "; ".join(looks + [f"color: {self.colour}"] * bool(self.colour))


Row = tuple[str, list[Cell], list[Cell]]  # label, measured, the paper's


@dataclass
class Table:
    """`columns` are headings of the measured values, `paper_columns` those of the paper's; `blocks` group rows;
    `legend` says what headings and marks stand for."""

    columns: list[str]
    paper_columns: list[str] = field(default_factory=list)
    blocks: list[tuple[str, list[Row]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    legend: list[str] = field(default_factory=list)
    heading: str = "Method"
    data: pd.DataFrame | None = None  # content of the CSV, if not the cells

    @property
    def rows(self) -> list[Row]:
        return [row for _, rows in self.blocks for row in rows]

    @property
    def below(self) -> list[str]:
        """The paragraphs below the table: its notes and its legend."""
        return [*self.notes, *["; ".join(self.legend) + "."] * bool(self.legend)]


def fixed(value: float, decimals: int) -> str:
    """A number with this many decimals, without a negative zero."""
    return f"{round(value, decimals) + 0.0:.{decimals}f}"


def with_half_width(mean: float, half_width: float | None, decimals: int) -> str:
    """A mean, and the half-width of its interval if there is one."""
    return fixed(mean, decimals) + ("" if half_width is None else f" ± {half_width:.{decimals}f}")


def signed(number: str) -> str:
    """A number as text, with a plus sign if it has no minus sign."""
    return number if number.startswith("-") else f"+{number}"


def as_frame(table: Table) -> pd.DataFrame:
    """One row per table row: measured means and half-widths (or texts), and the paper's values in columns of their
    own; or `table.data`. A heading that occurs again is named with the last one that does not."""
    if table.data is not None:
        return table.data
    names, rows, unique = [], [], ""
    for name in table.columns:
        names.append(f"{unique}: {name}" if table.columns.count(name) > 1 else (unique := name))
    for block, entries in table.blocks:
        for label, measured, paper in entries:
            row: dict = {"block": block, "row": label}
            for name, cell in zip(names, measured, strict=True):
                row[name] = cell.text if cell.value is None and cell.text != MISSING else cell.value
                row[f"{name} ±"] = cell.half_width
            row |= {f"paper: {name}": cell.value for name, cell in zip(table.paper_columns, paper, strict=True)}
            rows.append(row)
    return pd.DataFrame(rows)


def styled(table: Table, shown: Callable[[str], str]) -> Styler:
    """The styled table, with texts converted by `shown`. A rule and a name open each block. Bold is the best value,
    italics are the paper's values, and cells are shaded."""
    headings = [table.heading, *table.columns, *(f"{name} (paper)" for name in table.paper_columns)]
    rows, starts, named = [], [], []
    for block, entries in table.blocks:
        starts.append(len(rows))
        if block:
            named.append(len(rows))
            rows.append([Cell(block), *[Cell("")] * (len(headings) - 1)])
        rows += [[Cell(label), *measured, *paper] for label, measured, paper in entries]
    frame = pd.DataFrame(rows, columns=range(len(headings)))
    return (
        frame.style.hide(axis="index")
        .format(lambda cell: shown(cell.text))
        .format_index(lambda column: shown(headings[column]), axis="columns")
        .set_properties(subset=(starts[1:], [0]), midrule="--latex")  # ignored by HTML
        .set_properties(subset=(starts[1:], slice(None)), **{"border-top": "1px solid"})
        .set_properties(subset=(named, [0]), **ITALIC)
        .set_properties(subset=frame.columns[1 + len(table.columns) :], **ITALIC)
        .map(lambda cell: cell.css)
    )


def as_tex(text: str) -> str:
    """Plain text as LaTeX for pdflatex: special characters escaped, signs as commands."""
    return MINUS.sub("$-$", text.translate(TEX_SIGNS))


def as_latex(table: Table) -> str:
    """A booktabs tabular with its notes below."""
    columns = "l" + "c" * len(table.columns) + ("|" + "c" * len(table.paper_columns)) * bool(table.paper_columns)
    tabular = styled(table, as_tex).to_latex(column_format=columns, hrules=True, convert_css=True)
    packages = r"% \usepackage{booktabs}" + r", \usepackage[table]{xcolor}" * ("color[HTML]" in tabular)
    notes = "".join(f"\\par\\smallskip{{\\footnotesize {as_tex(note)}\\par}}\n" for note in table.below)
    return f"{packages}\n{tabular}{notes}"


def as_html(table: Table) -> str:
    """An HTML page with the table and its notes below."""
    notes = "<br/>".join(map(escape, table.below))
    page = styled(table, escape).set_caption(notes).set_table_styles(HTML_STYLES)
    return page.to_html(doctype_html=True, table_uuid="table")


def as_markdown(table: Table) -> str:
    """One Markdown table per block with the name above, then the notes. Bold is best, italics are the paper's
    values."""
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
    return "\n".join([*lines, *(note.replace("*", "\\*") for note in table.below), ""])


def save(table: Table, stem: Path, *tables: Path) -> None:
    """Writes .csv, .tex, .html and .md beside `stem`, whatever its suffix. All but .csv say what they were made of,
    beginning with the `tables`."""
    source = made_of(tables)
    write_text(stem.with_suffix(".csv"), as_frame(table).to_csv(index=False))
    write_text(stem.with_suffix(".tex"), f"% {source}\n{as_latex(table)}")
    write_text(stem.with_suffix(".html"), f"{as_html(table)}<!-- {source} -->\n")
    write_text(stem.with_suffix(".md"), f"{as_markdown(table)}\n<!-- {source} -->\n")
