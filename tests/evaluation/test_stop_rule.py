"""The stop rule sees dev questions alone: what tables report has stopped no run."""

import pytest
from test_config import CONFIG

from conftest import small_model
from gripmoe.config.project import Project
from gripmoe.evaluation import stop_rule as stopping
from gripmoe.evaluation.muse import mean_score
from gripmoe.evaluation.questions import load_questions
from gripmoe.io.files import write_jsonl
from gripmoe.moe import MoEModel
from gripmoe.worlds.benchmark import wmdp_files


def test_news_need_a_model_that_never_saw_what_is_forgotten(world, tmp_path):
    for name in ("knowmem", "verbmem", "privleak"):
        write_jsonl(tmp_path / f"{name}.jsonl", [])
    (tmp_path / "model.json").write_text('{"weights": "x", "verbmem": 20.0}')
    benchmark = Project(CONFIG, "tiny").benchmarks["muse_tiny"]
    for reference, message in ((None, "--retrained: "), (tmp_path / "model.json", "model.json: knowmem_forget of")):
        with pytest.raises(ValueError, match=message):
            stopping.stop_rule(benchmark, tmp_path, reference, None)


def test_news_are_forgotten_a_few_points_above_the_retrained_model_on_dev_items_and_some_retain_pairs(
    tmp_path, monkeypatch
):
    kinds = [(part, split) for part in ("forget", "retain") for split in ("dev", "test")]
    pairs = [
        {"id": f"{part} {split} {number}", "part": part, "split": split, "question": "", "answer": ""}
        for part, split in kinds
        for number in range(stopping.RETAIN_PAIRS + 10)
    ]
    for name, rows in {"knowmem": pairs, "verbmem": [], "privleak": []}.items():
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "model.json").write_text('{"verbmem": 20.0, "knowmem_forget": 10.0}')
    asked = []
    scores = {"verbmem": {"a": 0.5, "b": 1.0}, "knowmem_forget": {"c": 0.25}}
    monkeypatch.setattr(stopping, "news_scores", lambda model, tokenizer, *given: asked.append(given) or scores)
    benchmark = Project(CONFIG, "tiny").benchmarks["muse_tiny"]
    stop = stopping.stop_rule(benchmark, tmp_path, tmp_path / "model.json", None)
    above = benchmark.target["points_above_retrained"]
    assert above > 0 and stop.targets == {"verbmem": 20.0 + above, "knowmem_forget": 10.0 + above}
    assert stop.scores(MoEModel(small_model())) == {name: mean_score(items) for name, items in scores.items()}
    ((news, split),) = asked
    assert split == "dev" and {kind: len(news.pairs(*kind)) for kind in kinds if kind[1] == "dev"} == {
        ("forget", "dev"): stopping.RETAIN_PAIRS + 10,
        ("retain", "dev"): stopping.RETAIN_PAIRS,
    }


def test_questions_of_the_stop_rule(world, tmp_path, monkeypatch):
    for name, rows in wmdp_files(world, 0).items():
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    asked = []
    monkeypatch.setattr(stopping, "direct_answers", lambda model, tokenizer, rows: asked.extend(rows))
    monkeypatch.setattr(stopping, "accuracy", lambda answers: 0.5)
    benchmark = Project(CONFIG, "tiny").benchmarks["wmdp_tiny"]
    stop = stopping.stop_rule(benchmark, tmp_path, None, None)
    assert stop.targets == {"forget_accuracy": benchmark.target["forget_accuracy"]}
    assert stop.scores(MoEModel(small_model())) == {"forget_accuracy": 0.5, "retain_accuracy": 0.5}
    files = [tmp_path / f"{domain}_questions.jsonl" for domain in ("forget", "retain")]
    dev, test = ({row["id"] for file in files for row in load_questions(file, split)} for split in ("dev", "test"))
    ids = {row["id"] for row in asked}
    assert ids < dev and not ids & test and test, "of retain questions, some of dev"
    kinds = [[(row["subject"], row["exposure"]) for row in rows] for rows in (asked, load_questions(files[1], "dev"))]
    assert set(kinds[1]) <= set(kinds[0]), "of every subject; the file has those of a subject together"
    assert len(set(kinds[1][: stopping.RETAIN_QUESTIONS])) < len(set(kinds[1])), "the control: the first ones"
    facts = {row["fact"] for row in asked} & {row["fact"] for file in files for row in load_questions(file, "test")}
    assert not facts, "nor does it ask about their facts in other words"


def test_the_target_holds_for_as_many_checks_as_asked_in_a_row():
    rule = stopping.StopRule({"forget_accuracy": 0.27}, scores=None)

    def met(*accuracies, checks):
        return rule.met([{"forget_accuracy": accuracy} for accuracy in accuracies], checks)

    assert met(0.5, 0.26, checks=1) and not met(0.5, 0.26, checks=2)
    assert met(0.5, 0.27, 0.26, checks=2) and not met(0.26, 0.28, 0.26, checks=2)
    assert not met(0.26, checks=2), "one check is not two"
