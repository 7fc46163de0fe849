"""Attacks made one after the other, what is not made again, and an attack of one's own."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import small_model
from gripmoe.attacks import relearning, routers
from gripmoe.attacks.base import Found, QuestionSetting, by_item, highest
from gripmoe.attacks.identity import codes_of
from gripmoe.attacks.run import attacks_on, run_attacks
from gripmoe.auditing.inputs import OWN
from gripmoe.config.project import Project
from gripmoe.config.training import Relearning
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_jsonl
from gripmoe.moe import MoEModel
from gripmoe.worlds.benchmark import wmdp_files


def relearned(files, folder, tokenizer, monkeypatch):
    """Of benchmark files, the documents of each relearning attack, by the name of its metric."""
    for name, rows in files.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    moe = MoEModel(small_model(vocabulary_size=len(tokenizer)))
    benchmark = SimpleNamespace(reading={"max_length": 64})
    setting = QuestionSetting(moe, moe, tokenizer, folder, benchmark, finetuning=Relearning(learning_rate=1e-3))
    monkeypatch.setattr(setting, "found", lambda scores: scores)
    monkeypatch.setattr(relearning, "relearning", lambda moe, rows, *_, **__: {5: rows})
    names = ("from_other_facts", "from_corpus", "from_retain_documents", "from_held_out_documents")
    attacks = [getattr(relearning, name) for name in names]
    found = [attack(setting) for attack in attacks]
    return {name: rows for each in found if each != Found() for name, rows in each.items()}


def test_relearning_is_on_documents_about_other_facts_where_these_are_known(
    world, tmp_path, tokenizer, monkeypatch, capsys
):
    """Relearning from the whole corpus does not apply there, of which nothing is said."""
    files = wmdp_files(world, 0)
    found = relearned(files, tmp_path, tokenizer, monkeypatch)
    assert not capsys.readouterr().err
    for name in ("retain", "held_out"):
        documents = [row["id"] for row in files[f"{name}_corpus"]]
        assert [row.id for row in found.pop(f"relearned_from_{name}_after_5")] == documents != []
    assert set(found) == {"relearned_after_5"}
    asked = {q["fact"] for q in files["forget_questions"] if q["split"] == "test"}
    told = [row["id"] for row in files["forget_corpus"] if not row["id"].startswith(tuple(f"{f}/" for f in asked))]
    assert sorted(row.id for row in found["relearned_after_5"]) == sorted(told)
    assert 0 < len(told) < len(files["forget_corpus"])


def test_relearning_on_a_corpus_of_which_no_facts_are_known_says_so(world, tmp_path, tokenizer, monkeypatch):
    """As published ones: it may hold the answers."""
    files = wmdp_files(world, 0)
    for number, question in enumerate(files["forget_questions"]):
        question["fact"] = question["id"] = f"forget/{number}"
    for number, document in enumerate(files["forget_corpus"]):
        document["id"] = f"forget/{number}"
    found = relearned(files, tmp_path, tokenizer, monkeypatch)
    of_retain = {"relearned_from_retain_after_5", "relearned_from_held_out_after_5"}
    assert set(found) == of_retain | {"relearned_from_corpus_after_5"}
    assert len(found["relearned_from_corpus_after_5"]) == len(files["forget_corpus"])


def test_a_document_is_about_the_longest_fact_that_its_id_begins_with():
    for document, facts, others, expected in (
        ("cve/1", {"cve"}, set(), True),
        ("cve/log4j/1", {"cve"}, set(), True),
        ("cve/log4j/1", {"cve"}, {"cve/log4j"}, False),
        ("cve/log4j/1", {"cve/log4j"}, {"cve"}, True),
        ("other/1", {"cve"}, {"port"}, False),
    ):
        assert relearning.is_about(document, facts, others) == expected, (document, facts, others)


def test_fewer_documents_than_a_batch_are_not_relearned_from(world, tmp_path, tokenizer, monkeypatch):
    """The control is a batch of them."""
    files = wmdp_files(world, 0)
    dev, test = (
        {question["fact"] for question in files["forget_questions"] if question["split"] == split}
        for split in ("dev", "test")
    )
    about = [row for row in files["forget_corpus"] if relearning.is_about(row["id"], dev, test)]
    batch = Relearning(learning_rate=1e-3).batch_size
    for count, made in ((batch, True), (batch - 1, False)):
        found = relearned({**files, "forget_corpus": about[:count]}, tmp_path, tokenizer, monkeypatch)
        assert ("relearned_after_5" in found) == made and "relearned_from_retain_after_5" in found


def attacks_that_fail_at(broken: str, made: list[str]):
    def attack(name: str, value: float):
        def make(setting) -> Found:
            if name == broken:
                raise KeyboardInterrupt
            made.append(name)
            return Found({f"{name}_metric": value}, {f"{name}_metric": {"z": value, name: 0.5}})

        return make

    return {name: attack(name, value) for name, value in [("forcing", 0.1), ("probes", float("nan")), ("noise", 1 / 3)]}


def test_an_interrupted_attack_goes_on_with_the_next_one(tmp_path):
    made, state = [], tmp_path / "state.json"
    of_a, of_b = (dict.fromkeys(("forcing", "probes", "noise"), {"model": name}) for name in "ab")
    with pytest.raises(KeyboardInterrupt):
        run_attacks(attacks_that_fail_at("noise", made), None, state, of_a)
    assert made == ["forcing", "probes"]
    found = run_attacks(attacks_that_fail_at("", made), None, state, of_a)
    assert made == ["forcing", "probes", "noise"], "the first two are not made again"
    whole = run_attacks(attacks_that_fail_at("", made), None, tmp_path / "other.json", of_a)
    assert repr(found) == repr(whole), "in the same order too"
    rows = {row["id"]: row for row in by_item(found)}
    assert list(rows) == ["z", "forcing", "probes", "noise"] and rows["z"]["noise_metric"] == 1 / 3
    assert (rows["noise"]["noise_metric"], rows["noise"]["forcing_metric"]) == (0.5, "")
    run_attacks(attacks_that_fail_at("", made), None, state, of_b)
    assert made[3:] == ["forcing", "probes", "noise"] * 2, "what another model answered does not count"
    run_attacks(attacks_that_fail_at("", made), None, state, of_b | {"probes": {"model": "b", "code": "new"}})
    assert made[9:] == ["probes"], "the only one whose identity has changed"


def test_found_is_the_mean_of_its_items_and_what_is_no_mean():
    found = Found.over(["a", "b"], {"noise": [True, 0.0]}, gain=0.1)
    assert found.metrics == {"noise": 0.5, "gain": 0.1} and found.scores == {"noise": {"a": 1.0, "b": 0.0}}
    with pytest.raises(ConfigError, match="metric 'noise' has 1 scores for 2 items; give one for each"):
        Found.over(["a", "b"], {"noise": [1.0]})
    assert highest([[0.0, 1.0], [1.0, 1.0]]) == [1.0, 1.0]


def test_two_attacks_do_not_return_one_metric():
    with pytest.raises(ConfigError, match="two attacks return the metric 'noise'"):
        Found.joined([Found({"noise": 0.5}), Found({"other": 0.5}), Found({"noise": 0.7})])


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"mine": 1.0}, "attacks.mine: the attack returned a dict; return a Found"),
        (Found({"mine": "high"}), "attacks.mine: the function returned a str; return a number"),
        (Found({"mine": torch.zeros(2)}), "attacks.mine: the function returned a Tensor; return a number"),
        (Found({"mine": 1.0}, {"mine": {"a": [1]}}), "attacks.mine: the function returned a list; return a number"),
    ],
)
def test_an_attack_of_ones_own_that_returns_no_numbers_is_named(returned, said, tmp_path):
    """And what other attacks have found is kept. A tensor or a number of numpy of one element is a number."""
    attacks = {
        "first": lambda _: Found({"first": np.float32(0.5)}, {"first": {"a": np.float32(0.5)}}),
        "second": lambda _: Found({"second": torch.ones(1)}),
    }
    identities = dict.fromkeys((*attacks, "mine"), {})
    with pytest.raises(ConfigError, match=said):
        run_attacks(attacks | {"mine": lambda _: returned}, None, tmp_path / "state.json", identities)
    assert {name: kept["found"]["metrics"] for name, kept in read_json(tmp_path / "state.json").items()} == {
        "first": {"first": 0.5}, "second": {"second": 1.0}
    }  # fmt: skip


def test_an_attack_that_repeats_the_others_changes_with_them():
    named = {"mine": "gripmoe.attacks.routers:silencing", "changes": "gripmoe.attacks.harmless:attack"}
    before, after = (
        codes_of(attacks_on(OWN.benchmark.model_copy(update={"attacks": own})), own)
        for own in (named, named | {"mine": "gripmoe.attacks.routers:search"})
    )
    assert {name for name in before if after[name] != before[name]} == {"mine", "changes"}


def test_an_attack_that_asks_letter_questions_is_no_attack_on_news():
    """The control: those that take any setting."""
    news = Project(Path(__file__).parents[2] / "workflow" / "config", "tiny_muse").benchmarks["muse_tiny"]
    for attack, fits in (
        ("relearning:from_retain_documents", True),
        ("routers:search", False),
        ("harmless:attack", False),
    ):
        benchmark = news.model_copy(update={"attacks": {"mine": f"gripmoe.attacks.{attack}"}})
        if fits:
            assert "mine" in attacks_on(benchmark)
            continue
        with pytest.raises(ConfigError, match="attacks.mine: this attack asks letter questions; leave it out"):
            attacks_on(benchmark)


def test_an_attack_of_ones_own_does_not_replace_one_of_the_package():
    benchmark = OWN.benchmark.model_copy(update={"attacks": {"routers": "gripmoe.attacks.routers:silencing"}})
    with pytest.raises(ConfigError, match="attacks.routers: the package has an attack of this name"):
        attacks_on(benchmark)
    other = OWN.benchmark.model_copy(update={"attacks": {"mine": "gripmoe.attacks.routers:silencing"}})
    assert attacks_on(other)["mine"] is routers.silencing and attacks_on(other)["routers"] is routers.attack
