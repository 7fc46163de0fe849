"""One HTML page that holds its own data: verdicts, a summary, charts, and tables to filter, sort and search.

DataTables draws a page of rows at a time. For every column the page stores the distinct values, and for each row the
number of its value, so that millions of rows fit in a few megabytes.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import itables
import jinja2
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gripmoe.io.files import read_text, write_text
from gripmoe.reporting import names

TEMPLATE = "page.html.jinja"
GOOD, BAD, PARTLY = "#0072b2", "#b34700", "#7a1f5c"  # background colours of verdict words; others are grey
COLOURS = {"holds": GOOD, "nothing found": GOOD, "does not hold": BAD, "hides": BAD, "not forgotten": PARTLY}
VERDICTS_SHOWN = 12  # the others are folded
MOST_CHOICES = 100  # entries of a drop-down
LONGEST_CHOICE = 60  # characters
WIDTH_OF_PHONES = 80  # characters: the rows of a wider table become cards
MARGINS = 3  # characters between two columns
SAID = {"True": "yes", "False": "no"}  # texts of cells
AVERAGED = ("correct", "score")  # columns whose mean over the filtered rows is shown above a table


def write_page(
    path: Path,
    *,
    title: str,
    verdicts: Sequence[tuple[str, str]],
    summary: pd.DataFrame,
    charts: Mapping[str, Figure],
    tables: Mapping[str, pd.DataFrame],
    source: str = "",
) -> None:
    """Writes the page.

    Args:
        verdicts: a word and a sentence each.
        summary: the first table.
        charts: figures by caption; they are closed.
        tables: by heading. A column with few values gets a drop-down, in the order of its categories if it has any.
        source: what the page was made of.
    """
    library = Path(itables.__file__).parent / "html"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(read_text(Path(__file__).with_name(TEMPLATE)))
    page = template.render(
        title=title,
        verdicts=verdicts,
        shown=VERDICTS_SHOWN,
        colours=COLOURS,
        charts={caption: _chart(figure, title) for caption, figure in charts.items()},
        tables=[_table(name, frame) for name, frame in {"Summary": summary, **tables}.items()],
        source=source,
        library=_packed(read_text(library / "dt_bundle.js").encode()),
        library_css=read_text(library / "dt_bundle.css"),
        methods={
            method.label: f"5px {'dashed' if method.dashed else 'solid'} {method.colour}"
            for method in names.METHODS.values()
            if method.colour
        },
    )
    write_text(path, page)


def _packed(content: bytes) -> str:
    # Of the record's page the highest level would save a twelfth, and take six times as long.
    return base64.b64encode(gzip.compress(content, compresslevel=7, mtime=0)).decode()


def _chart(figure: Figure, salt: str) -> dict:
    """The figure as a separate SVG image, so that its ids cannot clash with those of other figures. The same figure
    gives the same text."""
    buffer = io.BytesIO()
    with plt.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    points = re.search(rb'<svg [^>]*?width="([\d.]+)pt"', buffer.getvalue())[1]  # wider if text is outside the axes
    return {"svg": base64.b64encode(buffer.getvalue()).decode(), "inches": round(float(points) / 72, 2)}


def _table(name: str, frame: pd.DataFrame) -> dict:
    """The data of a table for the page's script. A column with a single value is shown once, above the table."""
    columns = [_column(str(column), frame[column]) for column in frame]
    shown = [column for column in columns if column["constant"] is None] or columns
    return {
        "name": name,
        "count": len(frame),
        "columns": shown,
        "common": [f"{column['name']} {column['constant']}" for column in columns if column not in shown],
        "is_wide": sum(column["longest"] + MARGINS for column in shown) > WIDTH_OF_PHONES,
    }


def _three_digits(numbers: np.ndarray) -> np.ndarray:
    """Numbers rounded to three significant digits; whole numbers stay whole."""
    return np.array([float(format(number, ".3g" if abs(number) < 1000 else ".0f")) for number in numbers])


def _column(name: str, values: pd.Series) -> dict:
    is_float = pd.api.types.is_float_dtype(values)
    codes, distinct = pd.factorize(values, sort=True)
    if is_float:  # fewer values take less room
        merged, distinct = pd.factorize(_three_digits(distinct.to_numpy(dtype=float)), sort=True)
        codes = np.append(merged, -1)[codes]
    is_number = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
    is_whole = bool((codes >= 0).all())
    texts = [str(value) for value in distinct]
    is_constant = len(texts) == 1 < len(values) and is_whole and not is_float
    longest = max(map(len, texts), default=0)
    is_choice = not is_float and (is_whole or not is_number) and len(texts) < len(values)
    width = np.min_scalar_type(len(distinct)).newbyteorder("<")
    in_json = texts if is_float and not np.isfinite(distinct).all() else distinct.tolist()
    return {
        "name": name,
        "values": _packed(json.dumps([None, *in_json], ensure_ascii=False).encode()),
        "codes": _packed((codes + 1).astype(width).tobytes()),  # 0: no value
        "bytes": width.itemsize,
        "constant": SAID.get(texts[0], texts[0]) if is_constant else None,
        "longest": longest,
        "filter": is_choice and 1 < len(texts) <= MOST_CHOICES and longest <= LONGEST_CHOICE,
        "number": is_number,
        "averaged": name in AVERAGED,
    }
