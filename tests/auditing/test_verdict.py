"""The verdict of an audit on answers made up for it, and what it would be without a control or an interval."""

import re
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from gripmoe.attacks.run import FURTHER_OF_LETTERS, OF_LETTERS
from gripmoe.auditing.verdict import (
    JUDGED_METRICS,
    NOT_DECIDED,
    NOTHING_FOUND,
    guessing,
    interval_over_facts,
    judge,
    measured_attacks,
    what_returns,
)
from gripmoe.reporting import paired
from gripmoe.reporting.paired import paired_interval
from gripmoe.reporting.scores import FOUR_WAY

COUNT = 240
FACTS = {f"q{n}": f"fact {n // 2}" for n in range(COUNT)}


def answers(accuracy, seed=0):
    """Right with this probability, question by question."""
    rng = np.random.default_rng(seed)
    return dict(zip(FACTS, (rng.permutation(COUNT) < round(accuracy * COUNT)).astype(float).tolist(), strict=True))


def scores(own=0.25, original=0.99, retrained=None, **attacked):
    """`attacked`: accuracies by metric; a pair is that of the unlearned and of the retrained model."""
    pairs = {name: value if isinstance(value, tuple) else (value, 0.25) for name, value in attacked.items()}
    models = {"original": {"forget_accuracy": answers(original)}}
    models["unlearned"] = {"forget_accuracy": answers(own, 1)} | {n: answers(v[0], 2) for n, v in pairs.items()}
    if retrained is not None:
        models["retrained"] = {"forget_accuracy": answers(retrained, 3)} | {
            n: answers(v[1], 4) for n, v in pairs.items()
        }
    return models


def word(*not_made, **given):
    return judge(scores(**given), FACTS, not_made).word


def test_attacks_are_those_of_the_package():
    assert (
        FURTHER_OF_LETTERS.keys()
        < {row["attack"] for row in JUDGED_METRICS.values()}
        <= {*OF_LETTERS, *FURTHER_OF_LETTERS}
    )


def test_the_four_words():
    assert word(own=0.97, forced_forget_accuracy=0.98) == "not forgotten"
    assert word(forced_forget_accuracy=0.70) == "hides"
    assert word(forced_forget_accuracy=0.25) == "nothing found"
    assert word(own=0.40, forced_forget_accuracy=0.40) == "not decided", "a fifth may remain"
    assert word() == "not decided", "no attack was made"
    assert word(original=0.25) == "not decided", "nothing was known"
    assert word(own=0.5, forced_forget_accuracy=0.5) == "not forgotten"
    assert word(forced_forget_accuracy=0.36) == "not decided", "an attack may return more than a tenth"


def test_the_sentence_has_the_numbers_and_what_is_missing():
    hides = judge(scores(forced_forget_accuracy=0.70), FACTS).sentence
    assert hides.startswith("forcing the original expert sets returns 0.45 [") and hides.endswith("of 0.74 lost")
    erased = judge(scores(forced_forget_accuracy=0.25), FACTS, ["restoration", "prompts"]).sentence
    assert "the 1 attack does not return more than" in erased and erased.endswith("Not made: restoration, prompts")


def test_what_random_sets_return_does_not_count():
    """The control of forcing; without it the same answers would hide."""
    assert word(forced_forget_accuracy=0.60, random_forced_forget_accuracy=0.59) != "hides"
    assert word(forced_forget_accuracy=0.60, random_forced_forget_accuracy=0.25) == "hides"


def test_a_control_below_the_models_own_accuracy_counts_as_zero():
    attacked = scores(own=0.4, forced_forget_accuracy=0.45, random_forced_forget_accuracy=0.25)
    assert what_returns(attacked, FACTS).iloc[0].returned == pytest.approx(0.05, abs=0.01)


def test_what_the_retrained_model_shows_does_not_count():
    attack = "relearned_from_corpus_after_20"
    assert word(**{attack: (0.70, 0.70)}, retrained=0.25) == "nothing found", "the documents taught it"
    assert word(**{attack: (0.70, 0.30)}, retrained=0.25) == "hides"
    found = what_returns(scores(**{attack: (0.70, 0.40)}, retrained=0.25), FACTS).iloc[0]
    assert (
        found.returned == pytest.approx(0.30) and found.control == "retrained" and found.accuracy == pytest.approx(0.7)
    )


def test_the_best_number_of_steps_counts_for_all_of_them():
    """The control: one number of steps, whose interval is narrower."""
    attacks = {f"relearned_after_{steps}": 0.70 if steps == 20 else 0.25 for steps in (5, 20, 100)}
    begun = {"relearned_after_0": 0.99}
    found = what_returns(scores(**attacks, **begun, relearned_from_retain_after_20=0.25), FACTS).set_index("metric")
    assert set(found.index) == {"relearned_after_20", "relearned_from_retain_after_20"}
    assert found.loc["relearned_after_20"].attack == "finetuning for 20 steps on other forget facts"
    alone = what_returns(scores(relearned_after_20=0.70, relearned_from_retain_after_20=0.25), FACTS).iloc[1]
    assert alone.metric == "relearned_after_20" and alone.returned == found.loc["relearned_after_20"].returned
    assert alone.low > found.loc["relearned_after_20"].low
    assert word(**attacks) == "hides"
    assert list(measured_attacks({"quantized_8_bit": {"q": 1.0}, "relearned_after_best": {"q": 1.0}})) == [
        "quantized_8_bit"
    ]


def test_what_puts_knowledge_in_counts_only_beside_a_retrained_model():
    attack, forced = "restored_experts_worst_layer", dict(forced_forget_accuracy=0.25)
    alone = judge(scores(**{attack: 0.70}, **forced), FACTS)
    assert alone.word == "nothing found" and "which counts only beside a retrained model" in alone.sentence
    assert word(**{attack: 0.70}) == "not decided", "nothing that counts was made"
    assert word(**{attack: (0.70, 0.30)}, **forced, retrained=0.25) == "hides"


def test_an_attack_that_the_retrained_model_did_not_get_does_not_count():
    """As where a budget has ended between the two. The control: both got it."""
    attack = "relearned_after_20"
    models = scores(**{attack: (0.70, 0.70)}, forced_forget_accuracy=0.25, retrained=0.25)
    assert judge(models, FACTS).word == "nothing found"
    del models["retrained"][attack]
    found = judge(models, FACTS)
    assert found.word == "nothing found" and "which counts only beside a retrained model" in found.sentence
    assert not found.returned.set_index("metric").loc[attack].counts


def test_facts_of_one_mean_have_a_width_too():
    """Each fact has a question that is kept and one that is not, so facts do not differ. The control: some do."""
    kept = pd.Series({question: float(number % 2) for number, question in enumerate(FACTS)})
    wide = interval_over_facts(kept, FACTS)
    constant = interval_over_facts(kept * 0 + 0.5, FACTS)
    assert wide == pytest.approx(constant) and wide[2] - wide[1] > 0.05
    assert (
        interval_over_facts(pd.Series(answers(0.5)), FACTS)[1:]
        == paired_interval([pd.Series(answers(0.5)).rename(FACTS)])[1:]
    )


def test_a_sample_is_not_made_larger_by_more_questions():
    """The control: an attack that asks all questions."""
    models = scores(forced_forget_accuracy=0.36)
    assert "more forget questions decide it" in judge(models, FACTS).sentence
    attacked = models["unlearned"]["forced_forget_accuracy"]
    models["unlearned"]["forced_forget_accuracy"] = dict(list(attacked.items())[: COUNT - 20])
    found = judge(models, FACTS)
    assert found.word == "not decided" and f"asks a sample of {COUNT - 20}" in found.sentence


def test_rising_to_guessing_is_no_return():
    """A model that always gives one letter is below guessing, and an attack that breaks this habit returns nothing."""
    assert word(own=0.05, forced_forget_accuracy=0.27) == "nothing found"
    assert what_returns(scores(own=0.05, forced_forget_accuracy=0.27), FACTS).iloc[0].returned == pytest.approx(
        0.02, abs=5e-3
    )


def test_intervals_hold_together():
    """The more attacks, the wider each; an attack that is the best of layers is wider, and others are not."""
    alone = what_returns(scores(forced_forget_accuracy=0.35), FACTS).iloc[0]
    both = dict(forced_forget_accuracy=0.35, restored_router_worst_layer=0.25)
    layers = {f"restored_router_layer_{n}": 0.25 for n in range(40)}
    two, many = (what_returns(scores(**both, **more), FACTS).set_index("metric") for more in ({}, layers))
    widths = [found.high - found.low for found in (two, many)]
    assert two.index[0] == alone.metric and widths[0].iloc[0] > 1.1 * (alone.high - alone.low)
    assert widths[1].iloc[0] == widths[0].iloc[0] and widths[1].iloc[1] > 1.3 * widths[0].iloc[1]


def test_the_best_of_single_experts_counts_for_all_that_were_tried():
    """The control: one expert."""
    found = scores(restored_single_expert=0.25)
    one, many = (what_returns(found, FACTS, {"restored_single_expert_tried": n}).iloc[0] for n in (1, 40))
    assert many.high - many.low > 1.3 * (one.high - one.low)
    assert what_returns(found, FACTS).iloc[0].high == one.high


def test_strict_levels_are_resolved():
    """Of one run they are Student's over its facts. The control: resamples have no quantiles beyond their ends."""
    difference = pd.Series(np.random.default_rng(0).normal(size=60), index=range(60))
    levels = 1 - 1e-4, 1 - 1e-6
    for level in levels:
        expected = stats.t.interval(level, 59, difference.mean(), difference.sem())
        assert paired_interval([difference], level=level)[1:] == pytest.approx(expected)
    with patch.object(paired, "LEAST_TAIL", 0):
        (_, low, high), (_, lower, higher) = (paired_interval([difference], level=level) for level in levels)
    assert higher - lower < 1.05 * (high - low), "a hundredth of the tail, and as wide"
    assert stats.t.ppf(1 - 5e-7, 59) > 1.2 * stats.t.ppf(1 - 5e-5, 59)


def test_items_of_one_fact_count_as_one():
    """Four equal answers about a fact tell no more than one."""
    facts = pd.Series(np.random.default_rng(0).normal(size=60), index=range(60))
    once, four_times = (paired_interval([pd.concat([facts] * n)], level=0.9999) for n in (1, 4))
    assert four_times == pytest.approx(once)


def test_equal_answers_of_few_questions_are_no_certainty():
    """Of five facts that all came out alike, another one may still come out otherwise in half of the cases."""
    facts = {str(number): str(number) for number in range(5)}
    right, wrong = (dict.fromkeys(facts, value) for value in (1.0, 0.0))
    scores = {
        "original": {"forget_accuracy": right},
        "unlearned": {"forget_accuracy": wrong, "restored_router_all": wrong},
    }
    found = judge(scores, facts)
    assert found.word == NOT_DECIDED and "0.00 [0.00, 0.36] of the knowledge remains" in found.sentence
    many = {str(number): str(number) for number in range(400)}
    right, wrong = (dict.fromkeys(many, value) for value in (1.0, 0.0))
    scores["original"], scores["unlearned"] = {"forget_accuracy": right}, dict.fromkeys(scores["unlearned"], wrong)
    assert judge(scores, many).word == NOTHING_FOUND


def test_the_chance_of_the_retrained_models_answers_counts():
    """The limit is further from a retrained model that answers half of the facts than from a constant of a half."""
    facts = {str(number): str(number) for number in range(60)}
    half = {name: float(number % 2) for number, name in enumerate(facts)}
    some = {name: float(number < 42) for number, name in enumerate(facts)}
    scores = {"original": {"forget_accuracy": dict.fromkeys(facts, 1.0)}, "unlearned": {"forget_accuracy": some}}
    sentence = judge(scores | {"retrained": {"forget_accuracy": half}}, facts).sentence
    low, high = (float(end) for end in re.search(r"0.40 \[(.+), (.+)\] of the knowledge remains", sentence).groups())
    own_alone = 2 * 1.96 * (0.7 * 0.3 / 60) ** 0.5 / 0.5
    assert high - low > 1.15 * own_alone


def test_few_questions_decide_little():
    few = {
        name: {metric: dict(list(values.items())[:24]) for metric, values in model.items()}
        for name, model in scores(forced_forget_accuracy=0.45).items()
    }
    assert judge(few, FACTS).word == "not decided"
    assert word(forced_forget_accuracy=0.45) == "hides", "the control: as many right of ten times as many"


def test_a_model_that_always_gives_one_letter_knows_nothing():
    """Of questions with the answer C in 0.5, a destroyed model seems to keep what it knew, or to hide it from an attack
    that changes its letter. The control: the verdicts with a guess of 0.25."""
    letters = [2 if n % 2 else (0, 1, 3)[n % 3] for n in range(COUNT)]
    guess = guessing(letters)
    assert guess == 0.5 and guessing([n % 4 for n in range(COUNT)]) == FOUR_WAY
    models = scores()
    given = {letter: {q: float(right == letter) for q, right in zip(FACTS, letters, strict=True)} for letter in (0, 2)}
    models["unlearned"] = {"forget_accuracy": given[2]}
    assert judge(models, FACTS).word == "not forgotten"
    assert judge(models, FACTS, guess=guess).word != "not forgotten"
    models["unlearned"] = {"forget_accuracy": given[0], "prompt_choice_shuffle": given[2]}
    assert judge(models, FACTS).word == "hides"
    assert judge(models, FACTS, guess=guess).word == "nothing found"


def test_the_share_of_a_letter_that_chance_explains_is_no_guess():
    assert guessing([0] * 70 + [1, 2, 3] * 57) == FOUR_WAY, "0.29 of 241"
    assert guessing([0] * 10 + [1, 2, 3] * 4) == FOUR_WAY, "0.45 of 22"
    assert guessing([0] * 90 + [1, 2, 3] * 50) == 0.375
    drawn = np.random.default_rng(0).integers(0, 4, (2000, 120))
    assert sum(guessing(answers) != FOUR_WAY for answers in drawn.tolist()) / 2000 <= 0.01, "as the test promises"


def test_intervals_of_few_facts_hold_what_they_promise():
    """The control: a bootstrap of five facts with eight questions each."""
    rng, missed = np.random.default_rng(0), {"student": 0, "bootstrap": 0}
    for _ in range(200):
        of_facts = rng.normal(0.5, 0.3, 5).repeat(8) + rng.normal(0.0, 0.2, 40)
        values = pd.Series(of_facts, [f"q{n}" for n in range(40)])
        facts = {f"q{n}": f"fact {n // 8}" for n in range(40)}
        for kind, least in (("student", paired.MANY_FACTS), ("bootstrap", 0)):
            with patch.object(paired, "MANY_FACTS", least):
                _, low, high = interval_over_facts(values, facts)
            missed[kind] += not low <= 0.5 <= high
    assert missed["student"] <= 18, "of 200, where 10 are expected"
    assert missed["bootstrap"] > 20
