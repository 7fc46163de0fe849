"""The harness path: its template, and equality with the direct scorer."""

import math
from importlib import resources

import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import apply_template
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from conftest import small_model
from gripmoe.attacks.prompts import reworded
from gripmoe.config.benchmarks import Benchmark
from gripmoe.data.prompt_formats import LETTERS, REWORDINGS, letter_description
from gripmoe.evaluation.metrics import (
    choice_metrics,
    load_answers,
    own_metrics,
    question_results,
    require_other_names,
)
from gripmoe.evaluation.questions import (
    accuracy,
    direct_answers,
    harness_answers,
    harness_task,
    letter_token,
    load_questions,
    prompt_of,
)
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_csv, write_jsonl
from gripmoe.worlds.benchmark import question_rows


@pytest.fixture(scope="module")
def questions(world):
    facts = world.facts.forget[:10] + world.facts.of("computer science")[:10]
    return question_rows(world, facts, orders=1, seed=0)


def test_letters_of_several_tokens_are_refused(tokenizer, questions):
    """The harness adds the likelihoods of all tokens of a letter; one prediction gives one."""
    of_bytes = Tokenizer(BPE({letter: n for n, letter in enumerate(ByteLevel.alphabet())}, []))
    of_bytes.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bytewise = PreTrainedTokenizerFast(tokenizer_object=of_bytes, pad_token="!")
    with pytest.raises(ConfigError, match="'A' after 'Answer:' is not one token"):
        direct_answers(small_model(vocabulary_size=len(bytewise)), bytewise, questions)
    assert letter_token(tokenizer, "A") == tokenizer.convert_tokens_to_ids("A")


def test_task_is_the_harness_wmdp_template(tmp_path):
    published = resources.files("lm_eval") / "tasks" / "wmdp"
    template = yaml.safe_load((published / "_default_template_yaml").read_text())
    cyber = yaml.safe_load((published / "wmdp_cyber.yaml").read_text())
    ours = harness_task("x", tmp_path / "q.jsonl", "cybersecurity")
    for key in ("doc_to_text", "doc_to_choice", "doc_to_target", "output_type", "num_fewshot"):
        assert ours[key] == template[key], key
    rendered, published = (apply_template(task["description"], {}) for task in (ours, cyber))
    assert rendered == published
    for subject in ("genes \U0001f9ec", 'a "quoted" {{ subject }} \\n'):
        task = harness_task("x", tmp_path / "q.jsonl", subject)
        assert apply_template(task["description"], {}) == letter_description(subject)


def test_prompt_by_hand():
    question = {"subject": "history", "question": "Who ?", "choices": ["a", "b", "c", "d"]}
    assert prompt_of(question) == (
        "The following are multiple choice questions (with answers) about history.\n\n"
        "Who ?\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    )


def test_harness_equals_direct_log_likelihood_by_log_likelihood(tokenizer, questions, tmp_path):
    model = small_model(vocabulary_size=len(tokenizer))
    direct = direct_answers(model, tokenizer, questions)
    harness = harness_answers(model, tokenizer, questions, work_folder=tmp_path, batch_size=16)
    assert [a.id for a in direct] == [a.id for a in harness] == [q["id"] for q in questions]
    for a, b in zip(direct, harness, strict=True):
        assert (a.chosen, a.correct) == (b.chosen, b.correct)
        assert a.letter_logprobs == pytest.approx(b.letter_logprobs, abs=1e-4)
    assert len({a.letter_logprobs for a in direct}) == len(questions), "the scores are not constant"


def test_harness_equals_direct_in_bf16_too(tokenizer, questions, tmp_path):
    """Where no letter is likely, as after unlearning. The control: log-likelihoods that are themselves rounded."""
    model = small_model(vocabulary_size=len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.bfloat16()
    direct = torch.tensor([answer.letter_logprobs for answer in direct_answers(model, tokenizer, questions)])
    harness = harness_answers(model, tokenizer, questions, work_folder=tmp_path, batch_size=16)
    torch.testing.assert_close(torch.tensor([a.letter_logprobs for a in harness]), direct, atol=1e-4, rtol=0)
    rounded = torch.tensor(loglikelihoods(model, tokenizer, questions))
    assert (rounded - direct).abs().max() > 1e-2


def test_choices_that_are_dates_are_asked_as_they_are(tokenizer, questions, tmp_path):
    """Where all choices of a subject are. The control: the points in time that a reader may make of them."""
    model = small_model(vocabulary_size=len(tokenizer))
    dates = ["1999-01-01", "2000-01-01", "2001-01-01", "2002-01-01"]
    dated = [{**question, "choices": dates} for question in questions[:4]]
    direct = torch.tensor([answer.letter_logprobs for answer in direct_answers(model, tokenizer, dated)])
    for solved, shots in (((), 0), (dated, 1)):
        given = dict(work_folder=tmp_path, batch_size=16, solved=solved, shots=shots)
        harness = torch.tensor([a.letter_logprobs for a in harness_answers(model, tokenizer, dated, **given)])
        assert torch.allclose(harness, direct, atol=1e-4) == (not shots)
    times = [{**row, "choices": [f"{date} 00:00:00" for date in dates]} for row in dated]
    other = torch.tensor([answer.letter_logprobs for answer in direct_answers(model, tokenizer, times)])
    assert (other - direct).abs().max() > 1e-2


def loglikelihoods(model, tokenizer, questions, prompt=prompt_of):
    """Of the four letters of each question, by the harness itself."""
    asked = [
        Instance("loglikelihood", {}, (prompt(question), f" {letter}"), number)
        for number, question in enumerate(questions)
        for letter in LETTERS
    ]
    found = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16).loglikelihood(asked)
    return [[logprob for logprob, _ in found[start : start + 4]] for start in range(0, len(found), 4)]


def test_reworded_prompts_as_the_harness_answers_them(tokenizer, questions):
    model, verse = small_model(vocabulary_size=len(tokenizer)), reworded(REWORDINGS["verse"])
    direct = [answer.letter_logprobs for answer in direct_answers(model, tokenizer, questions, prompt=verse)]
    by_harness = loglikelihoods(model, tokenizer, questions, verse)
    for own, wanted in zip(direct, by_harness, strict=True):
        assert own == pytest.approx(wanted, abs=1e-4)
    plain = loglikelihoods(model, tokenizer, questions)
    assert (torch.tensor(plain) - torch.tensor(by_harness)).abs().max() > 1e-2


def test_a_tokenizer_with_a_bos_is_followed_as_the_harness_does(tokenizer, bos_tokenizer, questions, tmp_path):
    """The harness's own log-likelihoods, with no word about a BOS from here; those without one differ."""
    model = small_model(vocabulary_size=len(tokenizer))
    by_harness = loglikelihoods(model, bos_tokenizer, questions)
    through_it = harness_answers(model, bos_tokenizer, questions, work_folder=tmp_path, batch_size=16)
    for answers in (direct_answers(model, bos_tokenizer, questions), through_it):
        for answer, logprobs in zip(answers, by_harness, strict=True):
            assert answer.letter_logprobs == pytest.approx(logprobs, abs=1e-4)
    without = [answer.letter_logprobs for answer in direct_answers(model, tokenizer, questions)]
    assert (torch.tensor(without) - torch.tensor(by_harness)).abs().max() > 1e-2


@pytest.mark.parametrize(
    "subject", ["C [advanced]", "std::vector", "a/b", "C {{x}}", "a {% b", "{{ x }} {% endraw %}", "s" * 250]
)
def test_a_subject_may_have_any_characters(subject, tokenizer, questions, tmp_path):
    model, asked = small_model(vocabulary_size=len(tokenizer)), [{**row, "subject": subject} for row in questions[:4]]
    by_harness = harness_answers(model, tokenizer, asked, work_folder=tmp_path, batch_size=4)
    for own, wanted in zip(direct_answers(model, tokenizer, asked), by_harness, strict=True):
        assert own.letter_logprobs == pytest.approx(wanted.letter_logprobs, abs=1e-4)


def test_metrics_of_ones_own_stand_beside_those_of_the_package():
    """A mistake in their path is found before anything is measured."""
    task = {"data": {"source": "embedded"}, "target": {"forget_accuracy": 0.3}, "retain_documents": 2, "max_length": 9}
    benchmark = Benchmark(**task, evaluation_batch_size=8, metrics={"mine": "math:hypot"})
    assert own_metrics(benchmark)["mine"](3, 4) == 5.0
    require_other_names({"mine"}, {"forget_accuracy"})
    with pytest.raises(ConfigError, match="benchmarks.yaml: metrics.mine: .*math.* has no 'sqroot'; name what"):
        own_metrics(benchmark.model_copy(update={"metrics": {"mine": "math:sqroot"}}))
    with pytest.raises(ConfigError, match="metrics.mine: sys has no 'sqroot'; name what it defines"):
        own_metrics(benchmark.model_copy(update={"metrics": {"mine": "sys:sqroot"}}))
    with pytest.raises(ConfigError, match="metrics.forget_accuracy: the package has a metric of this name"):
        require_other_names({"forget_accuracy"}, {"forget_accuracy"})


def test_metrics_by_hand(questions):
    class Fixed:
        def __init__(self, question, chosen):
            self.id, self.chosen, self.correct = question["id"], chosen, chosen == question["answer"]
            self.letter_logprobs = (0.0, -1.0, -1.0, -1.0)

    always_a = [Fixed(question, 0) for question in questions]
    metrics = choice_metrics(questions, always_a)
    forget = [q for q in questions if q["exposure"] == "forget"]
    assert metrics["forget_accuracy"] == sum(q["answer"] == 0 for q in forget) / len(forget)
    assert math.isnan(metrics["retain_accuracy_unseen_subject"]), "the questions are about none"
    unseen = [question | {"exposure": "unseen_subject"} for question in questions[-10:]]
    metrics = choice_metrics(questions[:-10] + unseen, always_a)
    assert metrics["retain_accuracy_unseen_subject"] == sum(q["answer"] == 0 for q in unseen) / 10
    retain = [q for q in questions if q["exposure"] != "forget"]
    assert metrics["retain_accuracy"] == sum(q["answer"] == 0 for q in retain) / len(retain)
    right = [Fixed(question, question["answer"]) for question in questions]
    assert choice_metrics(questions, right)["retain_accuracy"] == accuracy(right) == 1.0
    rows = question_results(questions, right)
    assert rows[0]["correct"] == 1 and rows[0]["logprob_A"] == 0.0 and len(rows) == len(questions)


def test_answers_survive_their_file(tmp_path, tokenizer, questions):
    model = small_model(vocabulary_size=len(tokenizer))
    answers = direct_answers(model, tokenizer, questions)
    write_csv(tmp_path / "q.csv", question_results(questions, answers))
    reloaded = load_answers(tmp_path / "q.csv", questions[::-1])
    for a, b in zip(answers, reloaded[::-1], strict=True):
        assert (a.id, a.chosen, a.correct) == (b.id, b.chosen, b.correct)
        assert a.letter_logprobs == pytest.approx(b.letter_logprobs, abs=1e-6)
    with pytest.raises(ValueError, match="no answer to question 'new'; evaluate again"):
        load_answers(tmp_path / "q.csv", [{"id": "new"}])


def test_questions_of_a_split(tmp_path, questions):
    write_jsonl(tmp_path / "q.jsonl", questions)
    dev = load_questions(tmp_path / "q.jsonl", "dev")
    assert dev and all(row["split"] == "dev" for row in dev)
    with pytest.raises(ValueError, match="no questions in split 'train'"):
        load_questions(tmp_path / "q.jsonl", "train")


def test_letters_are_single_tokens_with_and_without_space(tokenizer):
    for letter in LETTERS:
        assert tokenizer(letter)["input_ids"] == tokenizer(f" {letter}")["input_ids"]
