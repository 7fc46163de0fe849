"""Hours by hand, and what is asked against what really asks."""

import copy
import inspect

import pytest
import torch

from conftest import small_model
from gripmoe import hours
from gripmoe.attacks import suite
from gripmoe.attacks.forcing import expert_forcing
from gripmoe.attacks.prompts import prompt_attacks
from gripmoe.attacks.quantization import quantization
from gripmoe.attacks.relearning import relearning
from gripmoe.attacks.restoration import restoration
from gripmoe.attacks.routers import router_attacks
from gripmoe.evaluation import general, muse, stopping
from gripmoe.evaluation.choice import direct_answers, prompt_of
from gripmoe.hours import hours_needed
from gripmoe.memory import Step
from gripmoe.moe import MoEModel
from gripmoe.planning import jobs_left
from gripmoe.worlds.benchmark import question_rows
from test_planning import changed

LARGE, SMALLER, LETTERS = "qwen3_30b_a3b", "qwen15_moe", "wmdp_cyber"
HOUR = 1e14 * 3600  # operations


def paper(**training):
    plain = changed("paper").world.training
    return changed("paper", training=plain.model_copy(update=training))


def tokens(project, what, *cell, model=LARGE, active=3.3e9):
    """That pass through all layers: two operations for each parameter that is active."""
    return hours_needed(project, Step(model, what, *cell)) * HOUR / (2 * active)


def test_training_by_hand():
    """Four documents of 512 tokens in each of 10,000 steps: forward, backward twice, forward again; and 201 checks of a
    third of WMDP-Cyber and 120 questions of MMLU."""
    checks = 201 * (1987 / 3 + 120) * 150
    trained = 10_000 * 4 * 512
    gd = LETTERS, "gd", "unconstrained"
    assert tokens(paper(), "unlearn", *gd) == pytest.approx(trained * 4 + checks)
    assert tokens(paper(gradient_checkpointing=False), "unlearn", *gd) == pytest.approx(trained * 3 + checks)
    assert tokens(paper(check_every=25), "unlearn", *gd) == pytest.approx(trained * 4 + checks * 401 / 201)


def test_what_runs_through_every_layer_by_hand():
    """RMU stops at layer 7 of 48, but where a constraint looks at all; checks do not. Method B within a check reads the
    retain documents."""
    plain = tokens(paper(), "unlearn", LETTERS, "gd", "unconstrained")
    trained = 10_000 * 4 * 512 * 4
    assert tokens(paper(), "unlearn", LETTERS, "rmu", "unconstrained") == pytest.approx(plain - trained * 40 / 48)
    assert tokens(paper(), "unlearn", LETTERS, "rmu", "anchored") == pytest.approx(plain)
    assert tokens(paper(), "unlearn", LETTERS, "gd", "ptc_matched") == pytest.approx(plain + 201 * 64 * 512)
    assert tokens(paper(), "realign", LETTERS, "gd", "ptc") == pytest.approx(64 * 512)


def test_evaluation_by_hand():
    """Two thirds of WMDP-Cyber, all of MMLU, 2,000 questions below five others, twelve options of TruthfulQA's 817, and
    250 documents six times."""
    asked = (1987 * 2 / 3 + 14_042 + 2000 * 6) * 150 + 817 * 12 * 250 + 6 * 250 * 512
    assert tokens(paper(), "evaluate", LETTERS, "gd", "anchored") == pytest.approx(asked)


def test_attacks_by_hand_grow_with_the_models_own_layers():
    """24 more layers: six more passes of the sample for each. Relearning is left out where a world leaves it out."""
    forcing, probes = 10 * 1987 * 2 / 3 + 2 * 1000, 4 * 1987 / 3 + 2 * 240
    sample = 240 * (6 * 48 + 5 + 6 + 8 + 8 + 5)
    relearned = 2 * 20 * 4 * 512 * 4
    by_hand = (forcing + probes + sample) * 150 + relearned
    cell = LETTERS, "gd", "anchored"
    assert tokens(paper(), "attack", *cell) == pytest.approx(by_hand)
    smaller = tokens(paper(), "attack", *cell, model=SMALLER, active=2.7e9)
    assert by_hand - smaller == pytest.approx(240 * 6 * 24 * 150)
    assert tokens(changed("paper", relearning=None), "attack", *cell) == pytest.approx(
        by_hand - relearned - 240 * 8 * 150
    )


def test_finetuning_by_hand_goes_through_its_epochs():
    """Of 889 articles to forget, 1,777 to retain and 1,778 held out; its oracle not of the first."""
    project = changed("paper_muse")
    oracle = f"{LARGE}_news_oracle"
    for name, articles in ((f"{LARGE}_news", 889 + 1777 + 1778), (oracle, 1777 + 1778)):
        assert tokens(project, "finetune_model", model=name) == pytest.approx(5 * articles * 900 * 4)
    project.models[oracle] = project.models[oracle].model_copy(update={"epochs": 10})
    assert tokens(project, "finetune_model", model=oracle) == pytest.approx(10 * 3555 * 900 * 4)


def test_news_by_hand():
    """Recited 128 tokens and answered 32, each as long as 50 that are read below a prompt of 500."""
    project, cell = changed("paper_muse"), ("muse_news", "gd", "anchored")
    recited, answered = 500 + 128 * 50, 500 + 32 * 50
    check = 100 / 3 * (recited + answered) + 20 * answered
    training = 10_000 * 4 * 2048 * 4
    news = f"{LARGE}_news"
    assert tokens(project, "unlearn", *cell, model=news) == pytest.approx(training + 201 * check)
    asked = 200 / 3 * (recited + 2 * answered) + 200 * 2048 + (4 * 1778 + 2 * 889) * 900
    assert tokens(project, "evaluate", *cell, model=news) == pytest.approx(asked)
    forced = 6 * 200 / 3 * (recited + answered)
    recalls = (6 * 48 + 5 + 6 + 4) * 32 * answered
    assert tokens(project, "attack", *cell, model=news) == pytest.approx(forced + recalls + 20 * 4 * 2048 * 4)


def test_a_plan_counts_these(tmp_path):
    jobs = {(job.rule, job.cell): job.hours for job in jobs_left(changed("paper", models=[SMALLER], gpus={}), tmp_path)}
    for rule in ("unlearn", "evaluate", "attack"):
        by_hand = hours_needed(paper(), Step(SMALLER, rule, LETTERS, "gd", "anchored"))
        assert jobs[rule, f"{SMALLER}.{LETTERS}.gd.anchored.0"] == by_hand


# Against what asks. ---------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_what_asks():
    assert (hours.RETAIN_QUESTIONS, hours.RETAIN_PAIRS) == (stopping.RETAIN_QUESTIONS, stopping.RETAIN_PAIRS)
    assert (hours.SAMPLE, hours.RETAIN_SAMPLE, hours.PAIRS) == (suite.SAMPLE, suite.RETAIN_SAMPLE, suite.PAIRS)
    assert (hours.RECITED, hours.ANSWERED) == (muse.RECITED_TOKENS, muse.ANSWER_TOKENS)
    assert (hours.SHOTS, hours.SCORED) == (general.SHOTS, muse.MAX_SCORED_TOKENS)
    checks = inspect.signature(relearning).parameters["checks"].default
    assert (hours.RELEARNING_STEPS, hours.RELEARNING_CHECKS) == (max(checks), len(checks))
    rows = {
        key: count for b in changed("paper").benchmarks.values() for key, count in getattr(b.data, "rows", {}).items()
    }
    assert {key: rows[key] for key in hours.ROWS} == hours.ROWS


@pytest.fixture(scope="module")
def models(tokenizer):
    """A random model and the same with other experts and routers."""
    before = MoEModel(small_model(vocabulary_size=len(tokenizer)))
    after = MoEModel(copy.deepcopy(before.model))
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in after.layers:
            for parameter in after.block(layer).parameters():
                parameter.copy_(torch.randn_like(parameter))
    return before, after


def test_attacks_ask_as_often_as_is_said(models):
    before, after = models
    asked = []

    def recall(model):
        asked.append(1)
        return [1.0]

    restoration(before, after, recall, {layer: [0, 1] for layer in after.layers})
    restored = len(asked)
    router_attacks(after, recall)
    routers = len(asked) - restored
    quantization(after, recall)
    rounded = len(asked) - restored - routers
    assert restored + 2 * routers + rounded == hours.recalls(len(after.layers))


def test_prompts_and_forced_experts_ask_as_often_as_is_said(models, world, tokenizer):
    before, after = models
    forget = question_rows(world, world.facts.forget[:8], orders=1, seed=0)[:8]
    retain = question_rows(world, world.facts.retain[:8], orders=1, seed=0)[:5]
    kinds = []
    others = {"translation": prompt_of, "no_terms": prompt_of}
    prompt_attacks(after, forget, [], lambda model, rows, prompt: kinds.append(prompt) or [1.0], others=others)
    assert len(kinds) == hours.PROMPTS
    rows = []

    def count(module, args, kwargs):
        rows.append(len(kwargs["input_ids"]))

    hooks = [moe.model.model.register_forward_pre_hook(count, with_kwargs=True) for moe in models]

    def answers(moe, questions):
        return direct_answers(moe.model, tokenizer, questions)

    normal = answers(after, forget)
    rows.clear()
    expert_forcing(before, after, tokenizer, forget, retain, normal, answers, answers)
    for hook in hooks:
        hook.remove()
    assert sum(rows) == hours.FORCED * len(forget) + hours.FORCED_RETAIN * len(retain)
