"""Attacks repeated on a model with a harmless change."""

import copy

import pytest
import torch

from conftest import small_model
from gripmoe.attacks import harmless
from gripmoe.attacks.base import Found, QuestionSetting
from gripmoe.config.training import Relearning
from gripmoe.data.documents import encode
from gripmoe.evaluation.questions import direct_answers
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import weights_digest
from gripmoe.worlds.benchmark import question_rows


@pytest.fixture
def setting(world, tokenizer, monkeypatch):
    before = MoEModel(small_model(vocabulary_size=len(tokenizer)))
    after = MoEModel(copy.deepcopy(before.model))
    rows = [encode(tokenizer, [(f"News number {number} of the day .", True)]) for number in range(16)]
    monkeypatch.setattr(QuestionSetting, "corpus", lambda self, name: {"held_out": rows}[name])
    return QuestionSetting(before, after, tokenizer, None, None, finetuning=Relearning(learning_rate=1e-2))


def test_every_other_attack_is_made_on_each_changed_model(setting, world, monkeypatch):
    """And its answers are those of the changed model; the model comes back."""
    questions, own, seen = question_rows(world, world.facts.forget[:4], orders=1, seed=0), setting.after.model, []

    def look(changed):
        answers = changed.own_answers
        seen.append((weights_digest(changed.after.model), [answer.letter_logprobs for answer in answers]))
        assert answers == direct_answers(changed.after.model, changed.tokenizer, questions)
        return Found({"found": float(len(seen))})

    def fails(_):
        raise AssertionError("skipped")

    monkeypatch.setattr(QuestionSetting, "forget", questions)
    attacks = {"probes": fails, "look": look, "harmless changes": harmless.attack}
    monkeypatch.setattr(harmless, "attacks_on", lambda _: attacks)
    unchanged = weights_digest(own), [a.letter_logprobs for a in direct_answers(own, setting.tokenizer, questions)]
    assert harmless.attack(setting).metrics == {"found_if_rounded": 1.0, "found_if_finetuned": 2.0}
    assert weights_digest(own) == unchanged[0] and all(p.grad is None for p in own.parameters())
    digests, answers = zip(unchanged, *seen, strict=True)
    assert len(set(digests)) == 3
    differences = [(torch.tensor(each) - torch.tensor(answers[0])).abs().max() for each in answers[1:]]
    assert 0 < differences[0] < differences[1], "ten steps at this rate change more than 8 bits"


@pytest.mark.parametrize("finetuning", [None, Relearning(learning_rate=1e-2, batch_size=17)], ids=["none", "too few"])
def test_without_finetuning_or_with_fewer_documents_than_a_batch_the_model_is_rounded_alone(
    finetuning, setting, monkeypatch
):
    monkeypatch.setattr(harmless, "attacks_on", lambda _: {"one": lambda _: Found({"found": 1.0})})
    setting.finetuning = finetuning
    assert harmless.attack(setting).metrics == {"found_if_rounded": 1.0}
