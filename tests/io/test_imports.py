"""Where jobs of the workflow look for code of one's own."""

import os
from pathlib import Path

import pytest

from gripmoe.io.imports import let_jobs_import_from


@pytest.mark.parametrize(("given", "then"), [("", "/mine"), ("/a:/b", "/a:/b:/mine"), ("/mine:/b", "/mine:/b")])
def test_a_folder_stands_once_and_behind_those_that_were_given(given, then, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", given)
    let_jobs_import_from(Path("/mine"))
    assert os.environ["PYTHONPATH"] == then
