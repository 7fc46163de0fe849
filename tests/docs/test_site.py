"""The built site in a browser: it asks nobody for anything, and its search works from a folder."""

from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "build" / "docs"
PAGES = (
    "index", "start", "tutorials/trainer", "geometry", "reference/api", "reference/configuration", "record",
    "notebooks/main_results",
)  # fmt: skip


@pytest.fixture
def site(chromium):
    if not (SITE / "index.html").exists():
        pytest.skip("not run: no site; `make docs` builds it")
    browser, asked, errors = chromium
    browser.on("request", lambda request: asked.append(request.url))
    browser.on("pageerror", lambda error: errors.append(str(error)))
    browser.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield browser
    assert not errors and asked and all(url.startswith(("file:", "data:")) for url in asked)


@pytest.mark.parametrize("width", [1400, 390])
def test_pages_fit_a_screen_and_a_telephone(site, width):
    site.set_viewport_size({"width": width, "height": 844})
    for name in PAGES:
        site.goto((SITE / f"{name}.html").as_uri())
        assert site.evaluate("document.documentElement.scrollWidth") <= width, name


def test_the_search_finds_a_command_and_a_key(site):
    for wanted, page in (("import-checkpoint", "Commands"), ("kaczmarz_steps", "Configuration")):
        site.goto(f"{(SITE / 'search.html').as_uri()}?q={wanted}")
        site.locator("#search-results li a", has_text=page).first.wait_for()


def test_notebooks_show_what_they_made(site):
    site.goto((SITE / "notebooks" / "main_results.html").as_uri())
    assert site.locator(".cell_output td").filter(has_text="±").count() > 20
    site.goto((SITE / "notebooks" / "forcing_vulnerability.html").as_uri())
    assert site.locator(".cell_output img").evaluate("image => image.naturalWidth") > 400


def test_formulas_are_drawn_without_a_script(site):
    site.goto((SITE / "geometry.html").as_uri())
    assert site.locator("math").count() > 10 and site.locator("math").first.bounding_box()["height"] > 5
    assert "\\mathcal" not in site.locator("article").inner_text()
