"""What the evaluation of news needs is asked for before any model is loaded."""

from pathlib import Path

import pytest

from gripmoe.cli import evaluate as command
from gripmoe.config.project import Project
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_json

CONFIG = Path(__file__).parents[2] / "workflow" / "config"


class Loaded(Exception):
    pass


def loads(*_):
    raise Loaded


def test_news_need_the_leakage_of_a_retrained_model(tmp_path, monkeypatch):
    """The control: with it, and for letter questions, the model is loaded."""
    project = Project(CONFIG, "tiny")
    monkeypatch.setattr(command, "load_model", loads)

    def evaluate(benchmark, retrained):
        monkeypatch.setattr(command, "run_and_benchmark", lambda *_: (None, project.benchmarks[benchmark]))
        names = ("run_file", "model_file", "checkpoint_file", "data", "questions")
        given = {name: tmp_path / name for name in names}
        command.evaluate(**given, benchmark_settings="", output=tmp_path / "out" / "m.json", retrained_file=retrained)

    write_json(tmp_path / "model.json", {"verbmem": 20.0})
    for retrained, named in ((None, "--retrained: "), (tmp_path / "model.json", "model.json: ")):
        with pytest.raises(ConfigError, match=f"{named}auc_min_40 of the retrained model is needed.*; name one"):
            evaluate("muse_tiny", retrained)
    write_json(tmp_path / "model.json", {"auc_min_40": 0.5})
    for benchmark, retrained in (("muse_tiny", tmp_path / "model.json"), ("wmdp_tiny", None)):
        with pytest.raises(Loaded):
            evaluate(benchmark, retrained)


def test_a_metric_of_ones_own_takes_what_it_is_given(tmp_path, monkeypatch):
    """Known before a model is loaded. The control takes further arguments that have defaults."""
    monkeypatch.setattr(command, "load_model", loads)
    given = {name: tmp_path / name for name in ("run_file", "model_file", "checkpoint_file", "data", "questions")}
    benchmark = Project(CONFIG, "tiny").benchmarks["wmdp_tiny"]
    for path, error in (("json:dumps", ConfigError), ("builtins:print", Loaded)):
        named = benchmark.model_copy(update={"metrics": {"mine": path}})
        monkeypatch.setattr(command, "run_and_benchmark", lambda *_, named=named: (None, named))
        with pytest.raises(error, match="metrics.mine: .*; let it take a model" if error is ConfigError else ""):
            command.evaluate(**given, benchmark_settings="", output=tmp_path / "out" / "m.json")
