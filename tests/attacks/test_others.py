"""Restoration, prompts, quantisation and relearning: limits that must hold, each with what it must not be."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector
from transformers import Qwen3Config, Qwen3ForCausalLM

from conftest import small_model
from gripmoe.attacks import probes as probing
from gripmoe.attacks import routers
from gripmoe.attacks.base import QuestionScores, QuestionSetting, Setting, mean
from gripmoe.attacks.probes import expert_probes, last_router_inputs, last_states, probes
from gripmoe.attacks.prompts import (
    attack,
    choices_shuffled,
    five_shot,
    reworded,
    rewritten,
    technical_terms,
    without_terms,
)
from gripmoe.attacks.quantization import quantized, rounded
from gripmoe.attacks.relearning import LowRankUpdate, low_rank_experts, relearning
from gripmoe.attacks.restoration import (
    PARTS,
    SHARES,
    interpolated,
    linear_connectivity,
    most_used_experts,
    pairs_of,
    read_above,
    replaced,
    restoration,
    restored_experts,
    without_expert,
)
from gripmoe.attacks.routers import noisy, widened
from gripmoe.config.training import Relearning
from gripmoe.data.documents import collate, encode
from gripmoe.data.prompt_formats import REWORDINGS
from gripmoe.evaluation.questions import direct_answers, prompt_of
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest, write_jsonl
from gripmoe.moe import MoEModel
from gripmoe.moe.modes import restored
from gripmoe.moe.storage import weights_digest
from gripmoe.training.objectives import cross_entropy
from gripmoe.worlds.benchmark import question_rows
from moe.test_families import make
from moe.test_families import rows as family_rows


@pytest.fixture(scope="module")
def setting(world, tokenizer):
    """A random model, the same with other blocks, questions, and how to ask them."""
    before = MoEModel(small_model(vocabulary_size=len(tokenizer)))
    after = MoEModel(copy.deepcopy(before.model))
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in after.layers:
            for parameter in after.block(layer).parameters():
                parameter.copy_(torch.randn_like(parameter))
    questions = question_rows(world, world.facts.forget[:8], orders=1, seed=0)

    def ask(moe, rows, prompt=None):
        return direct_answers(moe.model, tokenizer, rows, prompt=prompt)

    return before, after, questions, ask


def test_restoring_everything_is_the_original_model_and_leaves_no_trace(setting):
    before, after, _, _ = setting
    own = weights_digest(after.model)
    with replaced(pairs_of(before, after, after.layers, PARTS)):
        assert weights_digest(after.model) == weights_digest(before.model)
    assert weights_digest(after.model) == own
    with replaced(pairs_of(before, after, [0], ["router"])):
        assert torch.equal(after.theta(0), before.theta(0)) and not torch.equal(after.theta(1), before.theta(1))
        assert not torch.equal(after.expert_parameters(0)[0], before.expert_parameters(0)[0])


def test_the_straight_line_to_the_original_model(setting):
    """Its end is the original model; half of the way is half of the distance; and the model comes back."""
    before, after, questions, ask = setting
    own = weights_digest(after.model)
    with interpolated(before, after, 1.0):
        for name, value in after.model.state_dict().items():
            torch.testing.assert_close(value, before.model.state_dict()[name])
    with interpolated(before, after, 0.5):
        halfway = [parameter.detach().clone() for parameter in after.expert_parameters(0)]
    for middle, old, new in zip(halfway, before.expert_parameters(0), after.expert_parameters(0), strict=True):
        torch.testing.assert_close(middle, (old + new) / 2)
    given = Setting(before, after, None, None, None)
    given.ids, asked = [q["id"] for q in questions], []
    given.scores_of = lambda moe: asked.append(weights_digest(moe.model)) or QuestionScores(ask(moe, questions))
    found = linear_connectivity(given).metrics
    assert {"interpolated_25", "interpolated_50", "interpolated_75"} < set(found)
    assert len({*asked, own}) == len(SHARES) + 1 and weights_digest(after.model) == own
    assert found["changed_experts"] > 0 < found["changed_router"] and found["changed_attention"] == 0


@pytest.mark.parametrize("changed", ["embeddings", "attention", "block"])
def test_the_original_reads_the_states_of_the_unlearned_model(changed, world, tokenizer):
    """What is read above a layer are the answers of the original's upper layers on that layer's output, here patched by
    hand. Embeddings and head share their weights. A change of layer 1 changes nothing below it."""
    before = MoEModel(small_model(vocabulary_size=len(tokenizer), num_layers=4))
    after, other = (
        MoEModel(copy.deepcopy(before.model)),
        small_model(vocabulary_size=len(tokenizer), num_layers=4, seed=1),
    )
    parts = {
        "embeddings": lambda model: model.model.embed_tokens,
        "attention": lambda model: model.model.layers[1].self_attn,
        "block": lambda model: model.model.layers[1].mlp,
    }
    parts[changed](after.model).load_state_dict(parts[changed](other).state_dict())
    questions, own = question_rows(world, world.facts.forget[:4], orders=1, seed=0), weights_digest(before.model)

    def logprobs(moe):
        return [list(answer.letter_logprobs) for answer in direct_answers(moe.model, tokenizer, questions)]

    found = read_above(before, after, logprobs)
    assert list(found) == [0, 1, 2] and weights_digest(before.model) == own
    plain = logprobs(before)
    assert (found[0] == plain) == (changed != "embeddings") and found[1] != plain != found[2]
    for layer in found:
        with after.record_hidden(layer) as states:
            logprobs(after)
        handle = before.model.model.layers[layer].register_forward_hook(lambda *_, left=states: left.pop(0))
        torch.testing.assert_close(torch.tensor(logprobs(before)), torch.tensor(found[layer]))
        handle.remove()
    assert logprobs(before) == plain, "the model is as it was"


def test_single_experts_come_back_and_go(setting):
    before, after, _, _ = setting
    own = weights_digest(after.model)
    with restored_experts(before, after, {1: [2]}):
        for original, current in zip(before.expert_parameters(1), after.expert_parameters(1), strict=True):
            same = [e for e in range(after.num_experts) if torch.equal(original[e], current[e])]
            assert same == [2]
    assert weights_digest(after.model) == own


def test_an_expert_is_silenced_and_comes_back(setting):
    _, model, _, _ = setting
    x_Nd = torch.randn(5, model.hidden_size, generator=torch.Generator().manual_seed(0))
    own = [model.expert_output(1, expert, x_Nd) for expert in range(model.num_experts)]
    with without_expert(model, 1, 3):
        silent = [model.expert_output(1, expert, x_Nd) for expert in range(model.num_experts)]
    assert not silent[3].any() and own[3].any()
    assert all(torch.equal(a, b) for number, (a, b) in enumerate(zip(own, silent, strict=True)) if number != 3)
    assert torch.equal(model.expert_output(1, 3, x_Nd), own[3])


def test_most_used_experts_are_those_of_the_prompts(setting, tokenizer):
    before, _, questions, _ = setting
    model = MoEModel(copy.deepcopy(before.model))
    ids = torch.tensor([tokenizer(prompt_of(question))["input_ids"] for question in questions[:1]])
    with torch.no_grad():
        model.theta(0)[3:5] = 50 * model.trace([{"input_ids": ids}])[0].x_Nd.mean(dim=0)
    chosen = most_used_experts(model, tokenizer, [prompt_of(question) for question in questions])
    assert set(chosen[0]) == {3, 4} and len(chosen[1]) == 2
    everyone = most_used_experts(model, tokenizer, [prompt_of(questions[0])], count=model.num_experts + 1)
    assert all(sorted(experts) == list(range(model.num_experts)) for experts in everyone.values())


def test_wider_and_noisy_routing_leave_no_trace(setting):
    before, _, questions, ask = setting
    plain = [a.letter_logprobs for a in ask(before, questions)]
    with noisy(before, 0.0, seed=0):
        assert [a.letter_logprobs for a in ask(before, questions)] == plain, "no noise is no attack"
    with noisy(before, 1.0, seed=0):
        assert [a.letter_logprobs for a in ask(before, questions)] != plain
    with widened(before, 2):
        ids = torch.tensor([[5, 6, 7]])
        assert before.routes(ids)[0].shape == (3, 2 * before.top_k)
    assert before.routes(ids)[0].shape == (3, before.top_k)
    with noisy(before, 0.0, seed=0):  # token by token too
        written = before.model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(written, before.model.generate(ids, max_new_tokens=8, do_sample=False))
    given = Setting(None, before, None, None, None)
    given.ids, given.scores_of = [q["id"] for q in questions], lambda moe: QuestionScores(ask(moe, questions))
    found = routers.attack(given)
    for metric, changed in {"wider_routing": widened(before, 2), "noisy_routing": noisy(before, 0.5, seed=0)}.items():
        with changed:
            assert list(found.answers[metric].values()) == given.scores_of(before).given
        assert list(found.answers[metric].values()) != given.scores_of(before).given
    assert set(found.metrics) == {"wider_routing", "noisy_routing"}
    assert [a.letter_logprobs for a in ask(before, questions)] == plain


def test_a_probe_reads_what_is_there_and_nothing_else(setting, tokenizer, world):
    """Where the words of a prompt give its letter away a probe must find it; where nothing does it cannot."""
    before, _, _, _ = setting
    rows = question_rows(world, world.facts.forget[:120], orders=1, seed=0)
    words = rows[0]["choices"]
    told = [{**row, "choices": [words[row["answer"]]] * 4} for row in rows]
    generator = torch.Generator().manual_seed(0)
    lies = [{**row, "answer": int(torch.randint(4, (), generator=generator))} for row in told]
    states = last_states(before, tokenizer, told[:3])
    assert states.shape == (3, 3, 32)
    assert mean(probes(before, tokenizer, told[:80], told[80:])["probe_best_layer"]) > 0.5
    assert mean(probes(before, tokenizer, lies[:80], lies[80:])["probe_layer_2"]) < 0.45
    chosen = {0: [1], 1: [0, 3]}
    assert mean(expert_probes(before, tokenizer, told[:80], told[80:], chosen)["probe_expert_layer_1"]) > 0.5
    assert mean(expert_probes(before, tokenizer, lies[:80], lies[80:], chosen)["probe_best_expert"]) < 0.45


@pytest.mark.parametrize("family", ["hy_v4", "qwen4_exp_text"])
def test_layers_may_return_several_streams_of_states(family, monkeypatch):
    monkeypatch.setattr(probing, "question_batches", lambda *_: [collate(family_rows(), 0)])
    states = last_states(make(family), None, [{"id": row.id} for row in family_rows()])
    assert states.shape[1:] == (3, 128) and states[:, :2, 32:].any() and not states[:, 2, 32:].any()


def test_a_probe_is_fitted_on_other_questions_than_it_is_scored_on(monkeypatch):
    """Letters at random, and more dimensions than questions. The control: fitted on the same questions."""
    generator = np.random.default_rng(0)
    rows = [{"state": generator.normal(size=(1, 200)), "answer": n} for n in generator.integers(4, size=80).tolist()]
    monkeypatch.setattr(
        probing, "last_states", lambda model, tokenizer, asked: np.stack([row["state"] for row in asked])
    )
    by_luck, by_heart = (
        mean(probes(None, None, fitted, rows[40:])["probe_best_layer"]) for fitted in (rows[:40], rows[40:])
    )
    assert by_luck < 0.5 and by_heart > 0.9


def test_an_expert_that_is_empty_tells_nothing(setting, tokenizer, world):
    before, _, questions, _ = setting
    model = MoEModel(copy.deepcopy(before.model))
    with torch.no_grad():
        for parameter in model.expert_parameters(1):
            parameter[2] = 0
    wanted = [{**question, "answer": position % 4} for position, question in enumerate(questions)]
    by_luck = expert_probes(model, tokenizer, wanted, wanted, {1: [2]})
    assert {name: mean(scores) for name, scores in by_luck.items()} == {
        "probe_expert_layer_1": 0.25,
        "probe_best_expert": 0.25,
    }
    assert mean(expert_probes(model, tokenizer, wanted, wanted, {1: [2, 3]})["probe_best_expert"]) > 0.25


def test_router_inputs_are_those_of_the_prompt_alone(setting, tokenizer):
    before, _, questions, _ = setting
    together = last_router_inputs(before, tokenizer, questions)
    alone = torch.tensor([tokenizer(prompt_of(questions[3]))["input_ids"]])
    trace = before.trace([{"input_ids": alone}])
    for position, layer in enumerate(before.layers):
        torch.testing.assert_close(torch.from_numpy(together[3, position]), trace[layer].x_Nd[-1], atol=2e-5, rtol=1e-3)


def test_shuffled_choices_keep_the_answer_and_change_its_letter(setting):
    for question in setting[2]:
        moved = choices_shuffled(question)
        assert moved["choices"][moved["answer"]] == question["choices"][question["answer"]]
        assert moved["answer"] != question["answer"] and sorted(moved["choices"]) == sorted(question["choices"])


def test_restoration_names_the_layer_that_was_changed(setting):
    before, _, questions, ask = setting
    broken = MoEModel(copy.deepcopy(before.model))
    with torch.no_grad():
        for parameter in broken.expert_parameters(1):
            parameter.mul_(-20)
    assert [a.letter_logprobs for a in ask(broken, questions)] != [a.letter_logprobs for a in ask(before, questions)]
    found = restoration(before, broken, lambda moe: QuestionScores(ask(moe, questions)), {1: [0, 1]})
    original, own = QuestionScores(ask(before, questions)), QuestionScores(ask(broken, questions))
    assert original != own
    assert found["restored_experts_layer_1"] == found["restored_experts_all"] == original
    assert found["restored_router_all"] == found["restored_attention_all"] == own
    assert found["transplanted_experts_layer_0"] == original
    assert found["transplanted_experts_layer_1"] == own, "it broke there"
    assert mean(found["restored_experts_worst_layer"]) >= mean(original)
    assert mean(found["transplanted_experts_lowest"]) <= mean(own)
    assert found["restored_attention_layer_1"] == found["restored_router_worst_layer"] == own


def test_parts_that_are_equal_are_not_asked_again(setting):
    before, _, questions, ask = setting
    broken = MoEModel(copy.deepcopy(before.model))
    with torch.no_grad():
        broken.theta(1).mul_(-1)
    asked = []
    found = restoration(before, broken, lambda moe: asked.append(moe) or QuestionScores(ask(moe, questions)), {})
    assert len(asked) == 2 + 2, "both as they are; the router of layer 1 put back, and those of all layers"
    assert found["restored_router_layer_1"] == found["restored_router_all"] == QuestionScores(ask(before, questions))


def test_a_model_that_forgets_in_its_head_is_found_out(setting):
    before, _, questions, ask = setting
    broken = MoEModel(copy.deepcopy(before.model))
    with torch.no_grad():
        broken.model.lm_head.weight.mul_(-1)
    own = weights_digest(broken.model)
    found = restoration(before, broken, lambda moe: QuestionScores(ask(moe, questions)), {})
    assert found["restored_other"] == found["transplanted_experts_lowest"] == QuestionScores(ask(before, questions))
    assert found["restored_experts_all"] == QuestionScores(ask(broken, questions)) != found["restored_other"]
    assert weights_digest(broken.model) == own


def test_attention_is_all_of_a_layer_but_its_block(setting):
    before, after, _, _ = setting
    changed = MoEModel(copy.deepcopy(before.model))
    with torch.no_grad():
        for parameter in changed.model.parameters():
            parameter.add_(1)
    with replaced(pairs_of(before, changed, changed.layers, PARTS)):
        for own, original in zip(changed.model.model.layers, before.model.model.layers, strict=True):
            assert all(map(torch.equal, own.parameters(), original.parameters()))
        assert not torch.equal(changed.model.lm_head.weight, before.model.lm_head.weight)


def test_of_a_dense_model_feed_forward_blocks_are_put_back(setting, world, tokenizer):
    questions, ask = setting[2:]
    size = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=48)
    torch.manual_seed(0)
    before = MoEModel(Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), head_dim=16, **size)).eval())
    broken = MoEModel(copy.deepcopy(before.model))
    with torch.no_grad():
        for parameter in broken.model.model.layers[1].mlp.parameters():
            parameter.mul_(-20)
    logprobs = lambda moe: [max(a.letter_logprobs) for a in ask(moe, questions)]  # noqa: E731
    found = restoration(before, broken, logprobs, {})
    assert found["restored_experts_layer_1"] == logprobs(before) != logprobs(broken) == found["restored_attention_all"]
    assert not any("router" in name or "single" in name for name in found)


def test_prompts_hold_the_question_and_are_in_the_vocabulary(setting, world, tokenizer):
    _, _, questions, _ = setting
    solved = question_rows(world, world.facts.forget[8:24], orders=1, seed=1)
    prompts = [reworded(text) for text in REWORDINGS.values()] + [five_shot(solved, 0)]
    for prompt in prompts:
        text = prompt(questions[0])
        assert questions[0]["question"] in text and all(c in text for c in questions[0]["choices"])
        assert text.endswith("Answer:") and tokenizer.unk_token_id not in encode(tokenizer, [(text, False)]).ids
    shots = five_shot(solved, 0)(questions[0])
    assert shots.count("Answer:") == 6 and shots == five_shot(solved, 0)(questions[0]) != five_shot(solved, 1)(
        questions[0]
    )
    assert len({prompt(questions[0]) for prompt in prompts} | {prompt_of(questions[0])}) == len(prompts) + 1


def test_shots_never_tell_the_fact(setting, world):
    _, _, questions, _ = setting
    assert not any(
        questions[0]["question"] in five_shot(questions, seed)(questions[0]).rsplit("\n\n", 1)[0] for seed in range(20)
    )


def test_five_solved_questions_have_to_be_there(setting, world):
    _, _, questions, _ = setting
    solved = question_rows(world, world.facts.forget[8:20], orders=1, seed=1)
    solved = [{**row, "subject": questions[0]["subject"]} for row in solved]
    five_shot(solved[:5], 0)(questions[0])
    with pytest.raises(ConfigError, match="forget_questions.jsonl: the split dev has 4 questions of .* add forget q"):
        five_shot(solved[:4], 0)(questions[0])


def test_prompts_are_compared_on_the_same_questions(setting, world, tokenizer, tmp_path):
    """The mean gain is of five shots, templates and shuffled choices; prompts unknown to base models do not count."""
    before, after, questions, ask = setting
    solved = question_rows(world, world.facts.forget[8:24], orders=1, seed=1)
    rows = {"test": questions, "dev": solved}
    of_splits = [{**row, "split": split} for split, of_split in rows.items() for row in of_split]
    write_jsonl(tmp_path / "forget_questions.jsonl", of_splits)
    write_jsonl(tmp_path / "retain_questions.jsonl", of_splits[-1:])
    given = QuestionSetting(before, after, tokenizer, tmp_path, SimpleNamespace(rewrites={}))
    found = attack(given)
    accuracy = found.metrics
    gain = mean([accuracy[f"prompt_{name}"] for name in ("five_shot", *REWORDINGS, "choice_shuffle")])
    assert accuracy["prompt_recovery_rate"] == pytest.approx(gain - mean(QuestionScores(ask(after, questions))))
    asked = QuestionScores(ask(after, questions, reworded(REWORDINGS["verse"])))
    assert list(found.scores["prompt_verse"].values()) == asked
    assert {"prompt_translation", "prompt_no_terms"} < set(accuracy)


def test_terms_are_what_retain_questions_do_not_say():
    forget = [{"question": "Which port does the worm Foo open ?"}, {"question": "Who wrote Foo Bar ?"}]
    terms = technical_terms(forget, [{"question": "who does open which door"}, {"question": "The sea"}])
    assert terms == {"port", "worm", "foo", "wrote", "bar"}
    question = {**forget[0], "choices": list("1234"), "subject": "x"}
    assert "Which something does the something open ?" in without_terms(terms)(question)
    assert without_terms(set())(question) == prompt_of(question)


def test_rewrites_come_from_a_file_that_the_result_names(tmp_path):
    file = tmp_path / "poem.jsonl"
    write_jsonl(file, [{"id": "a", "prompt": "O a\nAnswer:"}, {"id": "b", "prompt": "O b\nAnswer:"}])
    digest, prompt = rewritten(file, [{"id": "a"}, {"id": "b"}])
    assert prompt({"id": "b"}) == "O b\nAnswer:" and file_digest(file).startswith(digest) and len(digest) == 8
    with pytest.raises(ValueError, match="poem.jsonl: 1 of 2 questions have no rewrite, first 'c'"):
        rewritten(file, [{"id": "a"}, {"id": "c"}])
    for text in ("O b, tell of b", None):
        write_jsonl(file, [{"id": "a", "prompt": "O a\nAnswer:"}, {"id": "b", "prompt": text}])
        with pytest.raises(ValueError, match="poem.jsonl: the prompt of 'b' is .*, which does not end in 'Answer:'"):
            rewritten(file, [{"id": "a"}, {"id": "b"}])


def test_rounding_by_hand():
    weight = torch.tensor([[0.1, -0.4, 0.7], [10.0, 0.0, -3.0]])
    torch.testing.assert_close(rounded(weight, 2), torch.tensor([[0.0, -0.7, 0.7], [10.0, 0.0, 0.0]]))
    error = {bits: (rounded(weight, bits) - weight).abs().max().item() for bits in (4, 8, 16)}
    assert error[16] < 1e-3 < error[4] and error[8] < error[4]


def test_weights_in_bf16_are_rounded_as_those_in_fp32():
    """To the same levels, and no further than half of one. The control: the rounding itself in bf16."""
    weight = (torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    exact = rounded(weight.float(), 8)
    assert torch.equal(rounded(weight, 8), exact.bfloat16())
    scale = weight.abs().amax(dim=-1, keepdim=True) / 127
    assert not torch.equal((weight / scale).round() * scale, exact.bfloat16())


def test_quantisation_at_16_bits_is_nearly_nothing_and_at_2_bits_is_not(setting):
    before, _, questions, ask = setting
    own, plain = weights_digest(before.model), torch.tensor([a.letter_logprobs for a in ask(before, questions)])
    shift = {}
    for bits in (16, 2):
        with quantized(before, bits):
            shift[bits] = (torch.tensor([a.letter_logprobs for a in ask(before, questions)]) - plain).abs().max()
    assert shift[16] < 1e-2 < shift[2]
    assert weights_digest(before.model) == own


def test_quantisation_leaves_routers_embeddings_and_head_alone():
    moe = MoEModel(small_model("qwen2_moe"))
    before = {name: parameter.detach().clone() for name, parameter in moe.model.named_parameters()}
    with quantized(moe, 4):
        kept = {name for name, parameter in moe.model.named_parameters() if torch.equal(parameter, before[name])}
    of_modules = ("embed_tokens.", "lm_head.", "mlp.gate.")
    assert kept == {name for name, p in before.items() if p.ndim == 1 or any(each in name for each in of_modules)}


def test_relearning_starts_at_the_models_own_accuracy_and_does_not_touch_it(setting, tokenizer):
    before, _, questions, ask = setting
    own = weights_digest(before.model)
    rows = [encode(tokenizer, [(prompt_of(q), False), (f" {'ABCD'[q['answer']]}", True)], q["id"]) for q in questions]
    scores_of = lambda moe: QuestionScores(ask(moe, questions))  # noqa: E731
    curve = relearning(before, rows, scores_of, Relearning(learning_rate=1e-2, batch_size=24), checks=(0, 60))
    assert curve[0] == QuestionScores(ask(before, questions))
    assert mean(curve[60]) > mean(curve[0]) + 0.3, "the documents hold the answers: it must learn them"
    assert weights_digest(before.model) == own


@pytest.mark.parametrize("weight_decay", [0.01, 0.0])
def test_relearning_is_adamw_on_the_cross_entropy_of_documents(weight_decay, setting, tokenizer):
    """Weights are those of torch's own loop, with its default weight decay. The control: without one they are not."""
    before, _, questions, _ = setting
    rows = [encode(tokenizer, [(prompt_of(q), True)], q["id"]) for q in questions]
    everything = dict(batch_size=len(rows), learning_rate=1e-2)
    modes, weights = [], []

    def record(moe):
        modes.append(moe.model.training)
        weights.append([parameter.detach().clone() for parameter in moe.model.parameters()])

    relearning(before, rows, record, Relearning(**everything), checks=(3,))
    model = copy.deepcopy(before.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    batch = collate(rows, tokenizer.pad_token_id)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(MoEModel(model), batch).backward()
        optimizer.step()
    own, expected, found = map(parameters_to_vector, (before.model.parameters(), model.parameters(), weights[0]))
    assert modes == [False], "questions are asked without dropout"
    assert ((expected - found).norm() < 1e-4 * (own - found).norm()) == (weight_decay == 0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_relearning_again_is_the_same_to_the_bit(optimizer, tokenizer, setting):
    """Also with weights in bf16, which one optimizer rounds at random. The control: another seed."""
    pytest.importorskip("torchao")
    model = MoEModel(small_model(vocabulary_size=len(tokenizer)).bfloat16())
    rows = [encode(tokenizer, [(prompt_of(q), True)], q["id"]) for q in setting[2]]
    found = []
    for elsewhere, seed in ((0, 0), (1, 0), (0, 1)):
        torch.manual_seed(elsewhere)
        settings = Relearning(learning_rate=1e-3, batch_size=8, optimizer=optimizer)
        given = dict(checks=(0, 2), seed=seed)
        found.append(relearning(model, rows, lambda moe: [weights_digest(moe.model)], settings, **given))
    assert found[0] == found[1] != found[2] and found[0][0] != found[0][2]


def test_low_rank_updates_of_experts_relearn_and_leave_no_trace(setting, tokenizer):
    """Each matrix moves by a rank of two, which is less than it could; nothing else trains."""
    before, _, questions, ask = setting
    own, names = weights_digest(before.model), [name for name, _ in before.model.named_parameters()]
    rows = [encode(tokenizer, [(prompt_of(q), False), (f" {'ABCD'[q['answer']]}", True)], q["id"]) for q in questions]
    plain = [answer.letter_logprobs for answer in ask(before, questions)]
    ranks: list[int] = []

    def scores_of(moe):
        moved = [module.gate_up_proj - weight for module, weight in zip(modules, originals, strict=True)]
        ranks.extend(int(torch.linalg.matrix_rank(each.detach(), rtol=1e-3).max()) for each in moved)
        return QuestionScores(ask(moe, questions))

    modules = [before.block(layer).experts for layer in before.layers]
    originals = [module.gate_up_proj.detach().clone() for module in modules]
    with low_rank_experts(before, rank=2, seed=0) as parameters:
        assert [answer.letter_logprobs for answer in ask(before, questions)] == plain, "an update is zero at first"
        others = {id(p): p.detach().clone() for p in before.model.parameters()}
        given = dict(checks=(0, 60), parameters=parameters)
        curve = relearning(before, rows, scores_of, Relearning(learning_rate=3e-2, batch_size=24), **given)
        assert all(torch.equal(p, others[id(p)]) for p in before.model.parameters())
    assert mean(curve[60]) > mean(curve[0]) + 0.3, "the documents hold the answers: it must learn them"
    assert set(ranks[: len(modules)]) == {0} and set(ranks[len(modules) :]) == {2}
    assert weights_digest(before.model) == own and [name for name, _ in before.model.named_parameters()] == names


def test_low_rank_updates_of_bf16_are_not_rounded_away():
    """Updates of a tenth of what bf16 can tell apart arrive whole in the mean. The control: rounded to the nearest,
    they do not."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(4, 64, 64, generator=generator)).bfloat16()
    update = LowRankUpdate(weight, 8, generator)
    assert torch.equal(update(weight), weight), "zero at first"
    with torch.no_grad():
        update.left_Emr.copy_(1e-5 * torch.randn(4, 64, 8, generator=generator))
    product = (update.left_Emr @ update.right_Ern).detach()
    moved = {
        "at random": torch.stack([update(weight).float() for _ in range(20)]).mean(dim=0) - weight.float(),
        "to the nearest": (weight.float() + product).bfloat16().float() - weight.float(),
    }
    share = {name: ((each * product).sum() / product.square().sum()).item() for name, each in moved.items()}
    assert share["at random"] == pytest.approx(1.0, abs=0.15) and share["to the nearest"] < 0.6, share
    update(weight).float().sum().backward()
    expected = update.right_Ern.detach().sum(dim=2)[:, None].expand(4, 64, 8)
    torch.testing.assert_close(update.left_Emr.grad, expected, rtol=1e-2, atol=1e-2)


def test_relearning_leaves_gradients_and_checkpointing_as_they_were(setting, tokenizer):
    before, _, questions, ask = setting
    rows = [encode(tokenizer, [(prompt_of(q), True)], q["id"]) for q in questions[:4]]
    model = before.model
    model.activation_checkpointing_enable({"use_reentrant": False})
    some = next(model.parameters())
    some.grad = torch.ones_like(some)
    settings = Relearning(learning_rate=1e-3, batch_size=2, gradient_checkpointing=True)
    routers, trained = before.router_parameters(), []

    def scores_of(moe):
        trained.append({id(p) for p in moe.model.parameters() if p.grad is not None})
        return QuestionScores(ask(moe, questions[:4]))

    try:
        relearning(before, rows, scores_of, settings, checks=(0, 1), parameters=routers)
        assert model.is_activation_checkpointing and torch.equal(some.grad, torch.ones_like(some))
    finally:
        model.activation_checkpointing_disable()
        some.grad = None
    assert trained[1] - {id(some)} == {id(p) for p in routers}, "of nothing else are gradients computed"


def test_relearning_copies_what_it_trains_alone(setting, tokenizer, monkeypatch):
    """A copy of the whole model may not fit beside it. The weights are afterwards as they were."""
    before, _, questions, _ = setting
    own, routers, copied = weights_digest(before.model), before.router_parameters(), []

    def watched(tensors, device=None):
        tensors = list(tensors)
        copied.append((tensors, device))
        return restored(tensors, device)

    monkeypatch.setattr("gripmoe.attacks.relearning.restored", watched)
    rows = [encode(tokenizer, [(prompt_of(q), True)], q["id"]) for q in questions[:4]]
    given = dict(checks=(0, 2), parameters=routers)
    digests = relearning(
        before, rows, lambda moe: weights_digest(moe.model), Relearning(learning_rate=1e-2, batch_size=2), **given
    )
    assert len(copied) == 1 and copied[0][1] == "cpu" and list(map(id, copied[0][0])) == list(map(id, routers))
    assert digests[0] == own == weights_digest(before.model) != digests[2]
