"""A page keeps what it is given, shows it in a browser, and asks nobody for anything."""

import base64
import gzip
import json
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from gripmoe.reporting.page import MOST_CHOICES, write_page

HOSTILE = "</script><script>document.title = 'taken over'</script><b>bold</b>"
WORDS = ["early", "late", "middle"]


def frame(rows=240):
    """Rows of known order: the score of row i is i / rows; a third of the rows has no letter."""
    numbers = np.arange(rows)
    return pd.DataFrame(
        {
            "method": np.array(["Unconstrained", "Frozen router"])[numbers % 2],
            "when": pd.Categorical.from_codes(numbers % 3, WORDS).reorder_categories(["early", "middle", "late"]),
            "seed": numbers % 4,
            "benchmark": "wmdp",
            "question": [f"Who built the {number}th tower? {HOSTILE if number == 7 else ''}" for number in numbers],
            "given": np.where(numbers % 3, "A", None),
            "correct": numbers % 2 == 1,
            "score": numbers / rows,
        }
    )


def figure():
    drawn, axes = plt.subplots(figsize=(4, 2))
    axes.plot([0, 1], [1, 0], label="curve")
    return drawn


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.html"
    summary = pd.DataFrame({"measure": ["forget accuracy", "steps"], "value": [0.25, 120.0], "n": [630, None]})
    verdicts = [("hides", "Forcing returns 0.31 of 0.43."), *[("undecided", f"Claim {i}.") for i in range(20)]]
    write_page(
        path,
        title="Runs & <attacks>",
        verdicts=verdicts,
        summary=summary,
        charts={"A curve": figure(), "The same": figure()},
        tables={"Questions": frame(), "Two alike": pd.DataFrame({"word": ["a", "a"]}), "Nothing": pd.DataFrame()},
        source="runs.csv sha256 0",
    )
    return path


def unpacked(text):
    return gzip.decompress(base64.b64decode(text))


def tables_of(path):
    """The tables that a page holds, decoded as its script does it."""
    found = {}
    for text in re.findall(r'<script type="application/json">(.*?)</script>', path.read_text(), re.DOTALL):
        table = json.loads(text)
        for column in table["columns"]:
            values = json.loads(unpacked(column["values"]))
            codes = np.frombuffer(unpacked(column["codes"]), dtype=f"<u{column['bytes']}")
            column |= {"distinct": values, "cells": [values[code] for code in codes]}
        found[table["name"]] = table
    return found


def test_a_page_keeps_every_cell(page):
    table, given = tables_of(page)["Questions"], frame()
    assert table["count"] == len(given) and table["common"] == ["benchmark wmdp"]
    columns = {column["name"]: column for column in table["columns"]}
    assert columns.keys() == {*given} - {"benchmark"}
    for name in {*columns} - {"score", "given"}:
        assert columns[name]["cells"] == given[name].tolist(), name
    assert columns["given"]["cells"] == [None if pd.isna(value) else "A" for value in given.given]
    assert columns["score"]["cells"] == pytest.approx(given.score.tolist(), rel=5e-3), "three digits"


def test_columns_of_few_values_get_a_drop_down(page):
    columns = {column["name"]: column for column in tables_of(page)["Questions"]["columns"]}
    assert [name for name, column in columns.items() if column["filter"]] == ["method", "when", "seed", "correct"]
    assert columns["when"]["distinct"] == [None, "early", "middle", "late"], "in the order of the categories"
    assert not any(column["filter"] for column in tables_of(page)["Summary"]["columns"])


def test_a_column_of_one_truth_is_said_as_in_cells(tmp_path):
    rows = pd.DataFrame({"counts": [True, True], "attack": ["noise", "verse"]})
    write_page(tmp_path / "page.html", title="", verdicts=[], summary=rows, charts={}, tables={})
    assert tables_of(tmp_path / "page.html")["Summary"]["common"] == ["counts yes"]


@pytest.mark.parametrize("distinct, width", [(2, 1), (255, 1), (256, 2), (65_536, 4)])
def test_codes_are_as_wide_as_they_must_be(distinct, width, tmp_path):
    values = pd.DataFrame({"id": [f"{number:06}" for number in range(distinct)] * 2})
    path = tmp_path / "page.html"
    write_page(path, title="", verdicts=[], summary=values, charts={}, tables={})
    column = tables_of(path)["Summary"]["columns"][0]
    assert column["bytes"] == width and column["cells"] == values.id.tolist()
    assert column["filter"] == (distinct <= MOST_CHOICES)


def test_numbers_that_json_cannot_hold_are_shown(tmp_path):
    path, values = tmp_path / "page.html", pd.DataFrame({"value": [np.inf, 12345.6, np.nan, 3.21987e-5]})
    write_page(path, title="", verdicts=[], summary=values, charts={}, tables={})
    assert tables_of(path)["Summary"]["columns"][0]["cells"] == ["inf", "12346.0", None, "3.22e-05"]


@pytest.mark.parametrize("rows", [{}, {"value": [np.nan, np.nan]}, {"value": []}])
def test_a_page_may_have_nothing_to_show(rows, tmp_path):
    write_page(tmp_path / "page.html", title="", verdicts=[], summary=pd.DataFrame(rows), charts={}, tables={})
    assert all(cell is None for c in tables_of(tmp_path / "page.html")["Summary"]["columns"] for cell in c["cells"])


def test_the_same_content_gives_the_same_page(page):
    first, others = page.read_bytes(), plt.get_fignums()
    summary = pd.DataFrame({"measure": ["forget accuracy"], "value": [0.25]})
    for path in (page.with_name("one.html"), page.with_name("two.html")):
        write_page(path, title="t", verdicts=[], summary=summary, charts={"A curve": figure()}, tables={})
    assert page.with_name("one.html").read_bytes() == page.with_name("two.html").read_bytes() != first
    assert plt.get_fignums() == others, "a figure is left open"


def test_millions_of_rows_are_small(tmp_path):
    """As a record of 250 runs has them: 100 attacks on 80 questions, right or wrong at random."""
    runs, attacks, asked = 250, 100, 80
    number = np.arange(runs * attacks * asked)
    cells = {"run": number // (attacks * asked), "attack": number // asked % attacks, "question": number % asked}
    rows = pd.DataFrame(
        {name: pd.Categorical.from_codes(c, [f"{name} {i}" for i in range(c.max() + 1)]) for name, c in cells.items()}
    )
    rows["score"] = np.random.default_rng(0).integers(0, 2, len(rows)).astype(float)
    write_page(tmp_path / "page.html", title="", verdicts=[], summary=rows, charts={}, tables={})
    assert len(rows) == 2_000_000 and (tmp_path / "page.html").stat().st_size < 2_000_000


class TestInABrowser:
    @pytest.fixture
    def opened(self, page, chromium):
        """The page, scrolled to its table of questions; afterwards nothing has been asked for or gone wrong."""
        browser, asked, errors = chromium
        browser.on("request", lambda request: asked.append(request.url))
        browser.on("pageerror", lambda error: errors.append(str(error)))
        browser.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        browser.goto(page.as_uri())
        section = browser.locator("section.table", has=browser.get_by_role("heading", name="Questions"))
        section.scroll_into_view_if_needed()
        section.locator("tbody tr").nth(9).wait_for()
        yield section
        assert not errors and not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]

    @staticmethod
    def cells(section, column):
        at = section.locator("thead th").all_inner_texts().index(column)
        return [row.locator("td").nth(at).inner_text() for row in section.locator("tbody tr").all()]

    def test_drop_downs_filter_and_offer_what_is_left(self, opened):
        info, found = opened.locator(".dt-info"), opened.locator(".found")
        assert "of 240 " in info.inner_text() and "All rows: benchmark wmdp." in found.inner_text()
        opened.get_by_role("combobox", name="method").select_option(label="Frozen router")
        opened.get_by_role("combobox", name="when").select_option(label="late")
        rows = frame()
        left = rows[(rows.method == "Frozen router") & (rows.when == "late")]
        assert f"1 to 10 of {len(left)} " in info.inner_text()
        assert f"score of the rows found: {left.score.mean():.3f}." in found.inner_text()
        assert "correct of the rows found: 1.000." in found.inner_text()
        assert {*self.cells(opened, "method")} == {"Frozen router"} and {*self.cells(opened, "when")} == {"late"}
        offered = opened.get_by_role("combobox", name="seed").locator("option:not([hidden])").all_inner_texts()
        assert offered == ["all", *map(str, sorted(left.seed.unique()))] != ["all", "0", "1", "2", "3"]
        opened.get_by_role("button", name="reset").click()
        assert "of 240 " in info.inner_text()

    def test_text_is_searched_and_shown_as_text(self, opened):
        search = opened.get_by_role("searchbox")
        search.fill("THE 7TH TOWER")
        opened.locator(".dt-info", has_text="1 to 1 of 1 ").wait_for()
        assert HOSTILE in self.cells(opened, "question")[0]
        assert opened.page.title() == "Runs & <attacks>"
        search.fill("no such tower")
        opened.locator(".dt-info", has_text="0 to 0 of 0 ").wait_for()

    def test_columns_sort_and_pages_turn(self, opened):
        first = opened.locator("tbody tr").first
        for heading, texts in {"score": ("0th tower", "239th tower"), "when": ("early", "late")}.items():
            for text in texts:  # of categories in their own order: "late" precedes "middle" otherwise
                opened.locator("thead th", has_text=heading).click()
                first.filter(has_text=text).wait_for()
        assert {*self.cells(opened, "when")} == {"late"}
        opened.locator(".dt-paging-button", has_text="24").click()
        opened.locator(".dt-info", has_text="231 to 240 of 240").wait_for()
        assert {*self.cells(opened, "when")} == {"early"}

    def test_what_stands_above_the_tables(self, opened):
        browser = opened.page
        verdicts = browser.locator(".verdicts li")
        assert verdicts.first.inner_text().split() == "hides Forcing returns 0.31 of 0.43.".split()
        assert browser.get_by_text("9 more").is_visible() and not verdicts.last.is_visible()
        for image in browser.get_by_role("img").all():
            assert image.evaluate("image => image.complete && image.naturalWidth > 0")
        assert browser.get_by_text("runs.csv sha256 0").is_visible()
        alike = browser.locator("section.table", has=browser.get_by_role("heading", name="Two alike"))
        alike.scroll_into_view_if_needed()
        alike.locator(".dt-info", has_text="1 to 2 of 2 ").wait_for()

    def test_a_telephone_shows_rows_as_cards(self, opened):
        browser = opened.page
        browser.set_viewport_size({"width": 390, "height": 844})
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        assert not opened.locator("thead").is_visible()
        label = "cell => getComputedStyle(cell, '::before').content"
        assert opened.locator("tbody td").first.evaluate(label) == '"method"'
        opened.get_by_role("combobox", name="seed").select_option(label="3")
        assert "of 60 " in opened.locator(".dt-info").inner_text()

    def test_a_request_or_an_error_would_be_seen(self, opened, chromium):
        browser, asked, errors = chromium
        browser.evaluate("fetch('http://127.0.0.1:9/').catch(() => console.error('seen'))")
        browser.wait_for_timeout(200)
        assert "http://127.0.0.1:9/" in asked and "seen" in errors
        asked.clear(), errors.clear()
