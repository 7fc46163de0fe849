"""Silenced experts and searched routing, against a model whose answers hang on one expert."""

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch

from conftest import small_model
from gripmoe.attacks import base, relearning, routers
from gripmoe.attacks.base import QuestionSetting, expert_usage, mean, routing_of, score_spread
from gripmoe.config.training import Relearning
from gripmoe.data.documents import Row
from gripmoe.evaluation.questions import Answer, direct_answers, prompt_of
from gripmoe.geometry.routing import LayerRouting
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import weights_digest
from gripmoe.worlds.benchmark import question_rows

NEVER = -1e4  # added to a score, no router selects its expert


@pytest.fixture
def setting(world, tokenizer):
    """Letter questions with the answers that a random model gives under its own routing."""
    model = MoEModel(small_model(vocabulary_size=len(tokenizer)))
    given = QuestionSetting(model, MoEModel(copy.deepcopy(model.model)), tokenizer, None, None)
    rows = question_rows(world, world.facts.forget[:40] + world.facts.retain[:20], orders=1, seed=0)
    answers = direct_answers(model.model, tokenizer, rows)
    rows = [{**row, "answer": answer.chosen} for row, answer in zip(rows, answers, strict=True)]
    given.dev, given.forget, given.retain = rows[:60], rows[60:120], rows[120:]
    return given


def shifts(model, layer, expert, size):
    scores = {number: torch.zeros(model.num_experts) for number in model.layers}
    scores[layer][expert] = size
    return scores


def sets_of(model):
    return model.routes(torch.tensor([[5, 6, 7, 8]]))


def test_a_shift_moves_sets_and_leaves_no_trace(setting):
    model = setting.after
    own = sets_of(model)
    with routers.biased(model, shifts(model, 0, 3, 0.0)):
        assert all(torch.equal(sets_of(model)[layer], own[layer]) for layer in model.layers)
    with routers.biased(model, shifts(model, 0, 3, NEVER)):
        assert not (sets_of(model)[0] == 3).any()
    with routers.biased(model, shifts(model, 0, 3, -NEVER)):
        assert (sets_of(model)[0] == 3).any(dim=1).all()
    assert all(torch.equal(sets_of(model)[layer], own[layer]) for layer in model.layers)


def answer_where(setting, monkeypatch, share):
    """Questions are answered with a probability, and rightly, where `share` of the routing of their prompts says so."""

    def ask(self, model, questions, prompt=None):
        answers = []
        for row in questions:
            sets = model.routes(torch.tensor([self.tokenizer(prompt_of(row))["input_ids"]]))
            known = share(sets)
            logprobs = [-9.0] * 4
            logprobs[row["answer"]] = known
            answers.append(Answer(row["id"], row["answer"], known > 0.5, tuple(logprobs)))
        return answers

    monkeypatch.setattr(QuestionSetting, "ask", ask)


def test_silencing_finds_the_expert_of_forget_prompts(setting, monkeypatch):
    """Questions are answered where no token is sent to expert 5, to which forget prompts alone are sent. The control:
    an expert that all prompts use is not silenced."""
    model = setting.after
    inputs, others = (
        torch.cat([seen[0].x_Nd for seen in routing_of(model, setting.tokenizer, prompts)]).mean(dim=0)
        for prompts in (setting.prompts, [prompt_of(row) for row in setting.retain])
    )
    with torch.no_grad():
        model.theta(0)[5] = 300 * (inputs - others) / (inputs - others).norm() ** 2
        model.theta(0)[6] = 300 * (inputs + others) / (inputs + others).norm() ** 2
    own = weights_digest(model.model)
    monkeypatch.setattr(routers, "SILENCED", (1,))
    answer_where(setting, monkeypatch, lambda sets: float(not (sets[0] == 5).any()))
    assert mean(setting.scores_of(model)) == 0.0
    assert routers.silencing(setting).metrics["silenced_experts"] == 1.0
    answer_where(setting, monkeypatch, lambda sets: float(not (sets[0] == 6).any()))
    assert routers.silencing(setting).metrics["silenced_experts"] == 0.0
    assert weights_digest(model.model) == own


def test_routing_is_counted_batch_by_batch(setting, monkeypatch):
    """The numbers are those of all tokens at once, and of two batches at most the router inputs are in memory."""
    model, given = setting.after, (setting.after, setting.tokenizer, setting.prompts[:12])
    monkeypatch.setattr(base, "length_buckets", lambda rows: [[row] for row in rows])
    parts = list(routing_of(*given))
    whole = {layer: LayerRouting.joined([part[layer] for part in parts]) for layer in model.layers}
    del parts
    traced, inputs, most = MoEModel.traced, [], []

    def watched(self, batches):
        for trace in traced(self, batches):
            inputs.append(weakref.ref(trace[0].x_Nd))
            most.append(sum(each() is not None for each in inputs))
            yield trace

    monkeypatch.setattr(MoEModel, "traced", watched)
    usage, spread = expert_usage(*given), score_spread(*given)
    for layer, seen in whole.items():
        counts_E = torch.bincount(seen.top_k_Nk.flatten(), minlength=model.num_experts).double()
        assert torch.equal(usage[layer], counts_E / counts_E.sum())
        assert spread[layer] == pytest.approx(seen.scores_NE.std().item(), rel=1e-6)
    assert len(inputs) == 24 and max(most) <= 2


def test_of_experts_used_alike_as_many_are_silenced_as_were_asked_for(setting, monkeypatch):
    """Where all prompts are routed alike, every expert's excess is the same."""
    silent = []
    monkeypatch.setattr(routers, "expert_usage", lambda model, *_: {n: torch.ones(8) / 8 for n in model.layers})
    monkeypatch.setattr(routers, "silenced", lambda model, experts: silent.append(experts) or nullcontext())
    routers.silencing(setting)
    assert [int(experts[0].sum()) for experts in silent[:-1]] == list(routers.SILENCED)


def test_as_many_experts_are_silenced_as_answer_most_dev_questions(setting, monkeypatch):
    """Two; of the test questions, any other number."""
    silent = []
    monkeypatch.setattr(
        routers, "silenced", lambda model, experts: silent.append(int(experts[0].sum())) or nullcontext()
    )

    def ask(self, model, questions, prompt=None):
        right = (silent[-1] == 2) == (questions[0] in self.dev)
        return [Answer(row["id"], 0, right, (0.0,) * 4) for row in questions]

    monkeypatch.setattr(QuestionSetting, "ask", ask)
    routers.silencing(setting)
    assert silent == [*routers.SILENCED, 2]


def test_search_takes_the_shift_under_which_right_letters_of_dev_questions_are_likeliest(setting, monkeypatch):
    """The second; of test questions, the third."""
    shifts = []
    monkeypatch.setattr(routers, "SEARCHED", (3,))
    monkeypatch.setattr(routers, "biased", lambda model, scores: shifts.append(scores) or nullcontext())

    def ask(self, model, questions, prompt=None):
        distance = abs(len(shifts) - (2 if questions[0] in self.dev else 3))
        return [Answer(row["id"], 0, True, (-float(distance),) * 4) for row in questions]

    monkeypatch.setattr(QuestionSetting, "ask", ask)
    routers.search(setting)
    assert len(shifts) == 4 and shifts[3] is shifts[1]


def test_search_keeps_the_shift_under_which_right_letters_are_likeliest(setting, monkeypatch):
    """The probability is the share of tokens that expert 3 serves. The longer search finds no less."""
    model = setting.after
    setting.dev, setting.forget = setting.dev[:24], setting.forget[:24]
    own = weights_digest(model.model)
    answer_where(setting, monkeypatch, lambda sets: (sets[0] == 3).any(dim=1).double().mean().item())
    monkeypatch.setattr(
        QuestionSetting,
        "scores_of",
        lambda self, moe: [
            a.letter_logprobs[q["answer"]] for q, a in zip(self.sample, self.ask(moe, self.sample), strict=True)
        ],
    )
    monkeypatch.setattr(routers, "SEARCHED", (1, 4, 12))
    found = [routers.search(setting).metrics[f"searched_routing_after_{count}"] for count in (1, 4, 12)]
    assert found == sorted(found) and found[-1] > mean(setting.scores_of(model)) + 0.1
    assert weights_digest(model.model) == own


def test_a_model_of_nan_is_searched_without_an_error(setting, monkeypatch):
    monkeypatch.setattr(routers, "SEARCHED", (1, 2))
    own = setting.scores_of(setting.after)
    with torch.no_grad():
        setting.after.model.model.layers[0].self_attn.o_proj.weight.fill_(float("nan"))
    broken = setting.scores_of(setting.after)
    found = routers.search(setting).metrics
    assert set(found.values()) == {mean(broken)} and broken != own


@pytest.mark.parametrize("settings, steps", [({}, (0, 5, 10, 20)), ({"steps": [3, 1]}, (0, 1, 3))])
def test_relearning_of_routers_changes_routers_alone(setting, tokenizer, monkeypatch, settings, steps):
    model, seen = setting.after, []
    setting.finetuning = Relearning(learning_rate=0.1, **settings)
    documents = [Row(f"{row['fact']}/answer", *[tokenizer(prompt_of(row))["input_ids"]] * 2) for row in setting.dev]
    monkeypatch.setattr(QuestionSetting, "corpus", lambda self, name: documents)
    before = {name: p.detach().clone() for name, p in model.model.named_parameters()}

    def scores_of(self, moe):
        seen.append({name for name, p in moe.model.named_parameters() if not torch.equal(p, before[name])})
        return [0.0] * len(self.ids)

    monkeypatch.setattr(QuestionSetting, "scores_of", scores_of)
    found = relearning.of_routers(setting).metrics
    assert set(found) == {f"relearned_routers_after_{step}" for step in steps}
    assert seen[0] == set() and all("gate" in name for name in seen[-1]) and seen[-1]
    assert not {name for name, p in model.model.named_parameters() if not torch.equal(p, before[name])}


def test_low_rank_updates_relearn_at_ten_times_the_rate(setting, monkeypatch):
    rates = []
    setting.finetuning = Relearning(learning_rate=1e-3)
    documents = [Row(f"{row['fact']}/answer", [3], [3]) for row in setting.dev]
    monkeypatch.setattr(QuestionSetting, "corpus", lambda self, name: documents)
    monkeypatch.setattr(QuestionSetting, "forget", setting.forget)
    monkeypatch.setattr(relearning, "relearning", lambda *given, **_: rates.append(given[3].learning_rate) or {})
    for attack in (relearning.of_routers, relearning.of_low_rank_experts):
        attack(setting)
    assert rates == [pytest.approx(1e-3), pytest.approx(1e-2)]
