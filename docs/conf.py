"""Configuration of Sphinx: `make docs` builds the site, which needs no network."""

import re
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

sys.path.insert(0, str(Path(__file__).parent))

import generate

from gripmoe import __version__ as release

project = "gripmoe"
author = "The gripmoe authors"
project_copyright = "The gripmoe authors, MIT licence"
extensions = ["myst_nb", "sphinx.ext.autodoc"]  # myst_nb brings myst_parser
suppress_warnings = ["toc.empty_glob"]  # a place for pages that are still to be written

nb_execution_mode = "off"  # `generate.execute_notebooks` has executed them, on the record
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
default_role = "code"  # docstrings have single backticks
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 88
html_theme = "furo"
html_title = f"gripmoe {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # summaries are fetched, which a page that is opened from a folder must not do
html_math_renderer = "mathml"  # which browsers draw themselves, without a script
highlight_language = "none"
templates_path = []


def fill(app, name: str, source: list[str]) -> None:
    """Puts generated text where a page says so, as `<!-- generated: commands -->`, and mends what only a site shows."""
    for part in generate.PARTS:
        if (place := f"<!-- generated: {part.__name__} -->") in source[0]:
            source[0] = source[0].replace(place, part())
    source[0] = source[0].replace("](../README.md", "](index.md")  # which includes the README
    source[0] = source[0].replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    if found := re.fullmatch(r"record/([\w/]+)/tables", name):  # whose titles are alike
        source[0] = source[0].replace("# Tables of the record\n", f"# Tables of the record: {found[1]}\n", 1)


def link_pages(app, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Makes links of pages that docstrings name."""
    lines[:] = [re.sub(r"\bdocs/(\w+)\.md", r":doc:`/\1`", line) for line in lines]


def inline_math(writer, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(writer, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="formula">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


explorer: list[Future] = []  # the page of all runs, which another process draws while notebooks run


def begin(app) -> None:
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    explorer.append(pool.submit(generate.explorer, Path(app.outdir) / "explorer.html"))
    generate.execute_notebooks(Path(app.srcdir) / "notebooks")


def end(app, exception: Exception | None) -> None:
    for page in explorer if exception is None else ():
        page.result()


def setup(app) -> None:
    app.connect("builder-inited", begin)
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("build-finished", end)
    app.add_html_math_renderer("mathml", inline_renderers=(inline_math, None), block_renderers=(block_math, None))
