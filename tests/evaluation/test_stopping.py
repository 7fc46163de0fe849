"""The stop rule sees dev questions alone: what tables report has stopped no run."""

from conftest import small_model
from gripmoe.evaluation import stopping
from gripmoe.evaluation.choice import load_questions
from gripmoe.files import write_jsonl
from gripmoe.moe import MoEModel
from gripmoe.project import Project
from gripmoe.worlds.benchmark import wmdp_files
from test_config import CONFIG


def test_questions_of_the_stop_rule(world, tmp_path, monkeypatch):
    for name, rows in wmdp_files(world, 0).items():
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    asked = []
    monkeypatch.setattr(stopping, "direct_answers", lambda model, tokenizer, rows: asked.extend(rows))
    monkeypatch.setattr(stopping, "accuracy", lambda answers: 0.5)
    benchmark = Project(CONFIG, "tiny").benchmarks["wmdp_tiny"]
    stop = stopping.stop_rule(benchmark, tmp_path, None, None)
    assert stop.targets == {"forget_accuracy": benchmark.target.forget_accuracy}
    assert stop.scores(MoEModel(small_model())) == {"forget_accuracy": 0.5, "retain_accuracy": 0.5}
    files = [tmp_path / f"{domain}_questions.jsonl" for domain in ("forget", "retain")]
    dev, test = ({row["id"] for file in files for row in load_questions(file, split)} for split in ("dev", "test"))
    ids = {row["id"] for row in asked}
    assert ids < dev and not ids & test and test, "of retain questions, the first few of dev"
    facts = {row["fact"] for row in asked} & {row["fact"] for file in files for row in load_questions(file, "test")}
    assert not facts, "nor does it ask about their facts in other words"
