"""The built site in a browser: it asks nobody for anything, and its search works from a folder."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    "index", "start", "tutorials/trainer", "geometry", "reference/api", "reference/configuration", "record",
    "notebooks/main_results",
)  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the site, built as by `make docs`; a warning, as of a link to no page, fails."""
    if os.environ.get("GRIPMOE_TEST_BROWSER") != "1" or not find_spec("sphinx"):
        pytest.skip("not run: builds the site, with GRIPMOE_TEST_BROWSER=1 and what `make sphinx` installs")
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--fresh-env", "--fail-on-warning", "--builder", "html"]
    command = [sys.executable, "-m", "sphinx", *options, ROOT / "docs", folder]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.fixture
def site(built, chromium):
    browser, asked, errors = chromium
    browser.on("request", lambda request: asked.append(request.url))
    browser.on("pageerror", lambda error: errors.append(str(error)))
    browser.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield browser
    assert not errors and asked and all(url.startswith(("file:", "data:")) for url in asked)


@pytest.mark.parametrize("width", [1400, 390])
def test_pages_fit_a_screen_and_a_telephone(site, built, width):
    site.set_viewport_size({"width": width, "height": 844})
    for name in PAGES:
        site.goto((built / f"{name}.html").as_uri())
        assert site.evaluate("document.documentElement.scrollWidth") <= width, name


def test_the_search_finds_a_command_and_a_key(site, built):
    for wanted, page in (("import-checkpoint", "Commands"), ("kaczmarz_steps", "Configuration")):
        site.goto(f"{(built / 'search.html').as_uri()}?q={wanted}")
        site.locator("#search-results li a", has_text=page).first.wait_for()


def test_notebooks_show_what_they_made(site, built):
    site.goto((built / "notebooks" / "main_results.html").as_uri())
    assert site.locator(".cell_output td").filter(has_text="±").count() > 20
    site.goto((built / "notebooks" / "forcing_vulnerability.html").as_uri())
    assert site.locator(".cell_output img").evaluate("image => image.naturalWidth") > 400


def test_formulas_are_drawn_without_a_script(site, built):
    site.goto((built / "geometry.html").as_uri())
    assert site.locator("math").count() > 10 and site.locator("math").first.bounding_box()["height"] > 5
    assert "\\mathcal" not in site.locator("article").inner_text()
