"""What makes an attack run again, and what does not."""

import pytest

from conftest import small_model
from gripmoe.attacks import relearning
from gripmoe.attacks.base import QuestionSetting
from gripmoe.attacks.identity import TEXTS, identities_of, with_texts
from gripmoe.attacks.run import FURTHER_OF_LETTERS, OF_LETTERS, attacks_on
from gripmoe.auditing.inputs import OWN, own_inputs
from gripmoe.config.training import Relearning
from gripmoe.io.files import write_jsonl, write_text
from gripmoe.moe import MoEModel

pytest_plugins = "audit_pairs"
EVERY = OF_LETTERS | FURTHER_OF_LETTERS
RELEARNING = {name for name, attack in EVERY.items() if attack.__module__ == relearning.__name__}
OWN_ATTACK, REPEATING = "mine", "harmless changes"


def changed(before: dict, after: dict) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_an_attack_is_made_again_where_what_it_reads_has_changed(tmp_path, monkeypatch):
    """One's own attack, and the one that repeats the others, may read all."""
    monkeypatch.syspath_prepend(tmp_path)
    write_text(tmp_path / "attack_of_mine.py", "def attack(setting):\n    return None\n")
    paths = {OWN_ATTACK: "attack_of_mine:attack", REPEATING: "gripmoe.attacks.harmless:attack"}
    benchmark = OWN.benchmark.model_copy(update={"attacks": paths})
    attacks = attacks_on(benchmark)
    files = {"forget_questions": "", **dict.fromkeys(TEXTS, "")}
    finetuning = Relearning(learning_rate=1e-3)

    def identities(benchmark=benchmark, finetuning=finetuning, **changed):
        return identities_of(attacks, benchmark, files | changed, finetuning, models=["a"])

    before, both = identities(), {OWN_ATTACK, REPEATING}
    of_relearning = RELEARNING & attacks.keys()
    assert changed(before, identities()) == set()
    assert changed(before, identities(forget_questions="other")) == set(attacks)
    assert changed(before, identities(membership="other")) == {"membership", *both}
    assert changed(before, identities(forget_corpus="other")) == {*of_relearning, *both}
    assert changed(before, identities(truthfulqa="other")) == both
    assert changed(before, identities(finetuning=Relearning(learning_rate=1e-2))) == {*of_relearning, *both}
    write_text(tmp_path / "verses.jsonl", "")
    rewritten = benchmark.model_copy(update={"rewrites": {"verse": str(tmp_path / "verses.jsonl")}})
    assert changed(before, identities(benchmark=rewritten)) == {"prompts", *both}
    larger = benchmark.model_copy(update={"evaluation_batch_size": 64})
    assert changed(before, identities(benchmark=larger)) == set()
    assert changed(before, identities(benchmark=benchmark.model_copy(update={"max_length": 64}))) == set(attacks)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "own answers"])
def test_an_attack_reads_no_other_texts(name, asked, tokenizer, tmp_path):
    """They are not there. The control: without those that it names, an attack that names some fails."""
    inputs = own_inputs(asked.forget, asked.retain, asked.forget_text, asked.retain_text, relearning={"steps": [1]})
    models = [MoEModel(small_model(vocabulary_size=len(tokenizer), seed=seed)) for seed in (0, 1)]
    identity = identities_of({name: EVERY[name]}, inputs.benchmark, dict.fromkeys(inputs.files, ""), None)[name]
    questions = with_texts(inputs.files, ())
    for number, kept in enumerate((identity["files"], questions)):
        folder = tmp_path / str(number)
        for file in kept:
            write_jsonl(folder / f"{file}.jsonl", inputs.files[file])
        setting = QuestionSetting(*models, tokenizer, folder, inputs.benchmark, 0, inputs.relearning)
        if number == 0 or kept.keys() == identity["files"].keys():
            EVERY[name](setting)
        else:
            with pytest.raises(Exception, match="_corpus.jsonl|membership.jsonl"):
                EVERY[name](setting)
