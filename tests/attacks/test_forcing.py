"""Expert forcing: what it recovers from a model whose experts were untouched, and its controls."""

import copy
import math

import pytest
import torch

from conftest import small_model
from gripmoe.attacks import forcing
from gripmoe.attacks.base import Found, QuestionScores, QuestionSetting, mean
from gripmoe.attacks.forcing import expert_forcing, prompt_agreement, random_sets
from gripmoe.evaluation.questions import Answer, direct_answers, harness_answers
from gripmoe.moe import MoEModel
from gripmoe.worlds.benchmark import question_rows


@pytest.fixture(scope="module")
def setting(world, tokenizer):
    before = MoEModel(small_model(vocabulary_size=len(tokenizer)))
    hidden = MoEModel(copy.deepcopy(before.model))
    hidden.set_thetas({layer: -theta for layer, theta in before.thetas().items()})  # only the routers moved
    forget = question_rows(world, world.facts.forget[:8], orders=1, seed=0)
    retain = question_rows(world, world.facts.retain[:8], orders=1, seed=0)
    return (
        before,
        hidden,
        tokenizer,
        forget,
        retain,
        lambda moe, rows, prompt=None: direct_answers(moe.model, tokenizer, rows),
    )


def given(before, after, tokenizer, forget, retain, ask, own=None):
    """What the attack is given, with answers of one's own if `own` makes some."""
    setting = QuestionSetting(
        before, after, tokenizer, None, None, known_answers=own or (lambda rows: ask(after, rows))
    )
    setting.forget, setting.retain, setting.ask = forget, retain, ask
    return setting


def test_original_sets_are_forced_on_both_kinds_of_questions_and_the_controls_on_forget_questions(setting):
    before, hidden, _, forget, retain, answer_all = setting
    found = expert_forcing(given(*setting))
    routes = {
        "forced_forget_accuracy": before.routes,
        "forced_with_recorded_weights": before.weighted_routes,
        "random_forced_forget_accuracy": random_sets(hidden, seed=0),
    }

    def forced(metric, rows):
        with hidden.force_routing(routes[metric]):
            return QuestionScores(answer_all(hidden, rows))

    answers = {metric: forced(metric, forget).given for metric in routes}
    assert {metric: list(by_id.values()) for metric, by_id in found.answers.items()} == answers
    each = [*answers.values(), QuestionScores(answer_all(hidden, forget)).given]
    assert all(one not in each[:number] for number, one in enumerate(each)), "no two are alike"
    accuracies = [mean(forced("forced_forget_accuracy", rows)) for rows in (retain, forget)]
    unforced = mean(QuestionScores(answer_all(hidden, retain)))
    assert found.metrics["forced_retain_accuracy"] == accuracies[0] not in (accuracies[1], unforced)
    assert found.metrics["num_shifted"] == len(forget)


def test_without_a_change_nothing_shifts_and_nothing_is_recovered(setting):
    before, _, *others = setting
    attacked = given(before, before, *others)
    found = expert_forcing(attacked)
    assert list(found.scores["forced_forget_accuracy"].values()) == QuestionScores(attacked.own_answers)
    metrics = found.metrics
    assert metrics["wrong_to_right"] == metrics["right_to_wrong"] == metrics["recovery_rate"] == 0
    assert metrics["num_shifted"] == 0 and math.isnan(metrics["recovery_rate_paper"]), "no subset, no rate"


def test_recovery_is_of_shifted_questions_as_the_paper_has_it_and_of_equal_ones(setting, monkeypatch):
    """Here two of eight shifted: one that forcing turns right, and one that was right before and is turned wrong."""
    before, hidden, tokenizer, forget, retain, _ = setting
    forget = forget[:8]
    right_before, right_forced = [0, 1, 1, 0, 1, 0, 0, 0], [1, 0, 1, 1, 1, 0, 0, 0]
    agreement = {question["id"]: 0.5 if number < 2 else 1.0 for number, question in enumerate(forget)}
    monkeypatch.setattr(forcing, "prompt_agreement", lambda *_: agreement)

    def answers(rows, pattern):
        return [Answer(q["id"], 0, bool(right), (0.0,) * 4) for q, right in zip(rows, pattern, strict=True)]

    def forced(moe, rows, prompt=None):
        return answers(rows, right_forced if rows is forget else [1] * len(rows))

    asked = given(before, hidden, tokenizer, forget, retain, forced, lambda rows: answers(rows, right_before))
    metrics = expert_forcing(asked).metrics
    assert metrics["num_shifted"] == 2
    assert metrics["recovery_rate"] == pytest.approx(4 / 8 - 3 / 8)
    assert metrics["recovery_rate_paper"] == pytest.approx(1 / 2 - 3 / 8), "shifted under force, all before"
    assert (metrics["wrong_to_right"], metrics["right_to_wrong"]) == (2, 1)


def test_the_harness_answers_under_force(setting, tmp_path):
    """lm-eval sees the forced sets as a direct question does, and a model's own sets change nothing."""
    before, hidden, tokenizer, forget, _, answer_all = setting

    def by_harness(moe):
        return harness_answers(moe.model, tokenizer, forget, work_folder=tmp_path, batch_size=3)

    def logprobs(answers):
        return torch.tensor([answer.letter_logprobs for answer in answers])

    free = logprobs(by_harness(hidden))
    with hidden.force_routing(before.routes):
        forced, directly = logprobs(by_harness(hidden)), logprobs(answer_all(hidden, forget))
    with hidden.force_routing(hidden.routes):
        own = logprobs(by_harness(hidden))
    torch.testing.assert_close(forced, directly, atol=1e-4, rtol=0)
    assert torch.equal(own, free) and (forced - free).abs().max() > 1e-2


def test_original_sets_with_their_weights_bring_the_original_answers_back(setting):
    """Where routers alone have moved."""
    before, hidden, tokenizer, forget, _, answer_all = setting

    def distance(answers):
        pairs = zip(answers, answer_all(before, forget), strict=True)
        return sum((torch.tensor(a.letter_logprobs) - torch.tensor(b.letter_logprobs)).norm().item() for a, b in pairs)

    own = distance(answer_all(hidden, forget))
    with hidden.force_routing(before.weighted_routes):
        forced = distance(answer_all(hidden, forget))
    assert forced < 1e-3 < own


def test_a_model_without_routers_is_not_forced(setting):
    dense = MoEModel(small_model("qwen3", vocabulary_size=len(setting[2])))
    assert expert_forcing(given(dense, dense, *setting[2:])) == Found()


def test_agreement_sees_shifted_prompts(setting):
    before, hidden, tokenizer, forget, *_ = setting
    agreement = prompt_agreement(before, hidden, tokenizer, forget)
    assert all(0 <= value < 0.5 for value in agreement.values())


def test_random_sets_are_distinct_experts_and_reproducible(setting):
    before = setting[0]
    input_ids = torch.zeros(3, 5, dtype=torch.long)
    first, again = (random_sets(before, seed=1)(input_ids)[0] for _ in range(2))
    assert torch.equal(first, again) and first.shape == (15, before.top_k)
    assert (first[:, 0] != first[:, 1]).all()
