"""Tables as they are written: the same cells as CSV, LaTeX, HTML and Markdown."""

import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import yaml
from invented_runs import COMPARISONS, synthetic

from gripmoe.reporting.attacks import attack_matrix
from gripmoe.reporting.comparison import comparison
from gripmoe.reporting.runs import COLUMNS
from gripmoe.reporting.tables import (
    Cell,
    Table,
    as_frame,
    as_html,
    as_latex,
    as_markdown,
    as_tex,
    save,
)
from gripmoe.reporting.uncertainty import interval

SPECIFICATIONS = yaml.safe_load(COMPARISONS.read_text(encoding="utf-8"))


def rows_of_html(page):
    """Texts of all rows, and those in bold."""
    table = ElementTree.fromstring(page[page.index("<table") : page.index("</table>") + len("</table>")])
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    texts = {cell.get("id"): "".join(cell.itertext()) for cell in table.iter("td")}
    rules = re.findall(r"([^{}]+)\{([^}]*)\}", page[page.index("<style") : page.index("</style>")])
    bold = [name.strip().lstrip("#") for names, rule in rules if "bold" in rule for name in names.split(",")]
    return rows, [texts[name] for name in bold]


def rows_of_latex(tex):
    body = tex[tex.index(r"\toprule") : tex.index(r"\bottomrule")]
    body = re.sub(r"\{\\cellcolor\[HTML\]\{\w{6}\}\} |\\color\[HTML\]\{\w{6}\} |\\(top|mid)rule\s|\\itshape ", "", body)
    lines = [line.removesuffix(r"\\").strip() for line in body.splitlines()]
    rows = [[text.strip() for text in re.split(r"(?<!\\)&", line)] for line in lines if line]
    bold = [text.removeprefix(r"\bfseries ") for row in rows for text in row if text.startswith(r"\bfseries ")]
    return [[text.removeprefix(r"\bfseries ") for text in row] for row in rows], bold


def rows_of_markdown(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    bold = [cell.strip("*") for row in rows for cell in row if cell.startswith("**")]
    return [[re.sub(r"^\*+(.*?)(?<!\\)\*+$", r"\1", cell).replace(r"\*", "*") for cell in row] for row in rows], bold


def of_every_row(name):
    """Runs with intervals everywhere, some below zero, every row marked, nothing missing."""
    spec = SPECIFICATIONS[name]
    benchmark = "muse_tiny" if spec.get("kind") == "news" else "wmdp_tiny"
    marks = {"reached": 0.0, "forget_accuracy_target": 0.25}
    rows = [
        (entry.get("model", "tiny_a"), benchmark, entry.get("objective", block.get("objective")), entry["method"], seed)
        + (metric, (value - 0.6 * (number % 2)) * (1 + seed / 10))
        for block in [*spec["blocks"], *[{"objective": "gd", "rows": []}] * spec.get("all_methods", False)]
        for entry in block["rows"] or [{"method": "unconstrained"}]
        for number, (metric, value) in enumerate((dict.fromkeys(spec["measured"], 0.277) | marks).items())
        for seed in (0, 1)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_every_format_holds_the_same_cells_and_notes(name):
    runs = of_every_row(name)
    table = attack_matrix(runs, name=name) if SPECIFICATIONS[name].get("differences") else comparison(runs, name)
    entries = [[label, *(cell.text for cell in (*measured, *paper))] for label, measured, paper in table.rows]
    headings = [table.heading, *table.columns, *(f"{column} (paper)" for column in table.paper_columns)]
    blocks = [block for block, _ in table.blocks if block]
    assert entries and any("-" in text for row in entries for text in row)

    html, tex, markdown = as_html(table), as_latex(table), as_markdown(table)
    (heading, *rows), _ = rows_of_html(html)
    assert heading == headings and [row for row in rows if any(row[1:])] == entries
    assert [row[0] for row in rows if not any(row[1:])] == blocks
    (heading, *rows), _ = rows_of_latex(tex)
    assert [row for row in [heading, *rows] if any(row[1:])] == [list(map(as_tex, row)) for row in (headings, *entries)]
    assert [row[0] for row in rows if not any(row[1:])] == list(map(as_tex, blocks))
    rows, _ = rows_of_markdown(markdown)
    assert [row for row in rows if row != headings] == entries and rows.count(headings) == len(table.blocks)
    assert all(f"**{block}**\n" in markdown for block in blocks)

    caption = "".join(ElementTree.fromstring(html[html.index("<caption") : html.index("</caption>") + 10]).itertext())
    assert caption == "".join(table.below) and len(table.below) > 1
    assert all(as_tex(note) in tex and note.replace("*", r"\*") in markdown for note in table.below)

    numbers = as_frame(table)
    for position, column in enumerate(table.columns):
        shown = [measured[position] for _, measured, _ in table.rows]
        assert numbers[column].tolist() == [cell.value for cell in shown]
        assert numbers[f"{column} ±"].fillna(0).tolist() == [cell.half_width or 0 for cell in shown]


def test_what_is_best_follows_the_data():
    """The worst retain accuracy is best where retain accuracies change sides."""
    runs = synthetic()
    swapped = runs.copy()
    retained = swapped.metric == "retain_accuracy"
    swapped.loc[retained, "value"] = 1.6 - swapped.value[retained]
    for data, best, other in ((runs, "0.91 ± 0.01", "0.71 ± 0.01"), (swapped, "0.89 ± 0.01", "0.69 ± 0.01")):
        table = comparison(data, "main_results")
        for _, bold in (rows_of_html(as_html(table)), rows_of_markdown(as_markdown(table))):
            assert best in bold and other not in bold
        assert as_tex(best) in (bold := rows_of_latex(as_latex(table))[1]) and as_tex(other) not in bold


def test_all_formats_are_written_and_do_not_change_without_a_reason(tmp_path):
    for folder in ("a", "b"):
        save(comparison(synthetic(), "main_results"), tmp_path / folder / "main_results.csv")
    written = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert set(written) == {f"main_results.{suffix}" for suffix in ("csv", "tex", "html", "md")}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert pd.read_csv(tmp_path / "a" / "main_results.csv")["paper: RS"].notna().sum() == 5
    assert b'charset="utf-8"' in written["main_results.html"][:1024], "where a browser looks for it"


def test_an_empty_table_is_its_notes():
    table = Table(["served"], [], notes=["Not measured: 1 < 2."])
    assert rows_of_html(as_html(table))[0] == [["Method", "served"]] and "1 &lt; 2" in as_html(table)
    assert rows_of_latex(as_latex(table))[0] == [["Method", "served"]]
    assert as_markdown(table) == "Not measured: 1 < 2.\n"


def test_latex_has_plain_signs_only():
    """What pdflatex takes: ASCII, escaped where it means something, math signs in math mode."""
    shown = "".join(file.read_text(encoding="utf-8") for file in COMPARISONS.parent.glob("*.[py]*"))
    assert {"±", "µ", "Δ", "‡"} <= set(shown) and as_tex(shown).isascii()
    cells = [Cell("< 0.001", 0.0), Cell("-0.25 ± 0.05 %", -0.25, shade=1.0)]
    tex = as_latex(Table(["a_b & c", "µs"], [], [("", [("Row *", cells, [])])], ["* 1 < 2; † so"]))
    assert r"$<$ 0.001 & {\cellcolor[HTML]{F5923E}} $-$0.25 $\pm$ 0.05 \%" in tex and r"a\_b \& c & $\mu$s" in tex
    assert tex.endswith("\\end{tabular}\n\\par\\smallskip{\\footnotesize * 1 $<$ 2; $\\dagger$ so\\par}\n")
    for name in SPECIFICATIONS:
        tex = as_latex(comparison(synthetic(), name))
        assert tex.isascii() and tex.count("{") == tex.count("}") and tex.count("$") % 2 == 0


def test_html_escapes_what_means_something_to_it():
    cells = [Cell("< 0.001", 0.0), Cell("a & b", 1.0, shade=0.5, colour="#0072b2")]
    page = as_html(Table(["<i>", "p & q"], [], [("<b>", [("Row", cells, [])])], ["1 < 2 & <script>"]))
    assert rows_of_html(page)[0] == [["Method", "<i>", "p & q"], ["<b>", "", ""], ["Row", "< 0.001", "a & b"]]
    assert "1 &lt; 2 &amp; &lt;script&gt;" in page and "<script>" not in page
    assert "background-color: #FAC89E" in page and "color: #0072b2" in page


def test_a_rule_stands_above_every_block_but_the_first():
    rows = [("Row", [Cell("1", 1.0)], [])]
    tex = as_latex(Table(["A"], [], [("", rows), ("GD", rows), ("", rows)]))
    assert tex.count(r"\midrule") == 3 and r"\midrule \itshape GD &" in tex and r"\midrule Row & 1" in tex


def test_headings_that_come_again_keep_their_numbers_in_the_csv():
    table = Table(["A", "p", "B", "p", "C"], [], [("", [("row", [Cell(str(i), i) for i in range(5)], [])])])
    assert as_frame(table).iloc[0][["A", "A: p", "B", "B: p", "C"]].tolist() == [0, 1, 2, 3, 4]


def test_interval_by_hand():
    mean, half = interval(pd.Series([1.0, 2.0, 3.0]))
    assert mean == 2.0 and half == pytest.approx(4.302653 / np.sqrt(3), rel=1e-5)
    assert interval(pd.Series([0.2, 0.6])) == pytest.approx((0.4, 0.2))
    assert interval(pd.Series([0.5])) == (0.5, None)
