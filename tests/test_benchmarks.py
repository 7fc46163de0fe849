"""The script for a GPU runs where there is none: every method and every figure that needs no card."""

import re
import sys
from pathlib import Path

import pytest

from gripmoe.adapter import METHODS
from gripmoe.project import Project


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).with_name("benchmarks"))
    import published_widths

    yield published_widths
    for name in ("published_widths", "test_step"):
        sys.modules.pop(name)


def test_the_figures_of_published_widths_name_every_method(script, tmp_path):
    script.main(f"--model tiny --layers 2 --steps 1 --rows 3 --length 20 --output {tmp_path / 'figures.md'}".split())
    text = (tmp_path / "figures.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", text, flags=re.MULTILINE))
    assert list(rows) == ["unconstrained", *METHODS] and all(float(ms) > 0 for ms in rows.values())
    assert all(float(seconds) >= 0 for seconds in re.findall(r"([\d.]+) s \((?:sound|paper)\)", text))
    assert "2 layers, d = 64, 8 experts, 2 per token" in text and int(re.search(r"(\d+) letter questions", text)[1]) > 0


@pytest.mark.parametrize("name, parameters", [("olmoe", 6.9e9), ("qwen15_moe", 14.3e9), ("qwen3_30b_a3b", 30.5e9)])
def test_widths_are_those_of_the_published_models(script, name, parameters):
    """By the number of their parameters, which models.yaml has too, counted without making them; and widths.yaml says
    the same."""
    import torch

    layers, words = {"olmoe": (16, 50304), "qwen15_moe": (24, 151936), "qwen3_30b_a3b": (48, 151936)}[name]
    with torch.device("meta"):
        model = script.WIDTHS[name](layers, words)
    untied = 0 if not model.config.tie_word_embeddings else model.get_output_embeddings().weight.numel()
    assert sum(p.numel() for p in model.parameters()) + untied == pytest.approx(parameters, rel=0.01)
    project = Project(Path(__file__).parents[1] / "workflow" / "config", "tiny")
    sizes, widths = project.models[name].parameters, project.widths[name]
    assert sizes.total == pytest.approx(parameters) and sizes.layers == layers
    config = model.config
    assert (widths.hidden, widths.experts) == (config.hidden_size, config.num_experts)
    assert widths.chosen == config.num_experts_per_tok
