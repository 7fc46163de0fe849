"""Hours by hand, and what is asked against what really asks."""

import copy
import inspect

import pytest
import torch

from conftest import small_model
from gripmoe import hours, memory
from gripmoe.attacks import suite
from gripmoe.attacks.forcing import expert_forcing
from gripmoe.attacks.prompts import prompt_attacks
from gripmoe.attacks.quantization import quantization
from gripmoe.attacks.relearning import relearning
from gripmoe.attacks.restoration import restoration
from gripmoe.attacks.routers import router_attacks
from gripmoe.data import corpora
from gripmoe.evaluation import general, muse, stopping
from gripmoe.evaluation.choice import direct_answers, prompt_of
from gripmoe.files import write_json
from gripmoe.hours import fit_threads, hours_needed
from gripmoe.memory import Step
from gripmoe.moe import MoEModel
from gripmoe.planning import jobs_left
from gripmoe.project import Project
from gripmoe.worlds.benchmark import question_rows
from test_planning import CONFIG, changed

LARGE, SMALLER, LETTERS = "qwen3_30b_a3b", "qwen15_moe", "wmdp_cyber"
GATHERED = 29e9 * 2 / 2 / 2e11  # seconds in which one of two GPUs receives the other's experts
ALONE = dict(gpus={}, models=[LARGE])


def paper(**changes):
    """The paper's world with other settings, of its own or of training."""
    plain = changed("paper").world.training
    own = {
        name: changes.pop(name)
        for name in ("gpus", "nodes", "models", "basis_memory", "basis_host_memory")
        if name in changes
    }
    return changed("paper", training=plain.model_copy(update=changes), **own)


def seconds(project, what, *cell, model=LARGE, results=None):
    return 3600 * hours_needed(project, Step(model, what, *cell), results)


def read(tokens, active=3.3e9):
    """Seconds in which they pass through all layers: two operations for each parameter that is active."""
    return tokens * 2 * active / 1e14


def tokens(project, what, *cell, model=LARGE, active=3.3e9):
    return seconds(project, what, *cell, model=model) / read(1, active)


def checked(count=201, tokens=(1987 / 3 + 120) * 150, passes=None, gathered=0.0):
    """A third of WMDP-Cyber and 120 questions of MMLU, 4,000 tokens at once."""
    return count * (read(tokens) + (tokens / 4000 if passes is None else passes) * gathered)


def test_training_by_hand():
    """Four documents of 512 tokens in each of 10,000 steps: forward, backward twice, forward again; AdamW reads and
    writes 29 billion weights, gradients and states in 8 bits; and nine checkpoints of 119 GB."""
    gd = LETTERS, "gd", "unconstrained"
    trained, saved = 10_000 * 4 * 512, 9 * 119
    adamw = 10_000 * 2 * 29 * (2 + 2 + 2) / 2500
    alone = paper(**ALONE)
    assert seconds(alone, "unlearn", *gd) == pytest.approx(read(trained * 4) + adamw + checked() + saved)
    kept = paper(**ALONE, gradient_checkpointing=False)
    assert seconds(kept, "unlearn", *gd) == pytest.approx(read(trained * 3) + adamw + checked() + saved)
    often = paper(**ALONE, check_every=25, checkpoint_every=500)
    assert seconds(often, "unlearn", *gd) == pytest.approx(read(trained * 4) + adamw + checked(401) + saved * 19 / 9)


def test_processes_gather_experts_and_wait_for_checks_and_checkpoints():
    """Both documents of both batches are shared; so are the states, but not checks, and both wait while they save. On
    two nodes experts come by the network."""
    gd = LETTERS, "gd", "unconstrained"
    waited = 2 * 9 * (2 * (2 * 1.5 + 29) + 29 * 2)
    adamw = 10_000 * 2 * 29 * (2 + 2 + 2) / 2500
    by_hand = read(10_000 * 4 * 512 * 4) + adamw + waited
    by_hand += 2 * (10_000 * 2 * 4 * GATHERED + checked(gathered=GATHERED))
    assert seconds(paper(), "unlearn", *gd) == pytest.approx(by_hand)
    far = seconds(paper(nodes={LARGE: 2}), "unlearn", *gd) - by_hand
    assert far == pytest.approx(7 * 2 * (10_000 * 2 * 4 * GATHERED + checked(gathered=GATHERED) - checked()))


def test_few_tokens_take_as_long_as_the_weights_take_through_memory():
    """Both batches of one short document: all 61 GB four times."""
    project = paper(**ALONE)
    project.benchmarks[LETTERS] = project.benchmarks[LETTERS].model_copy(update={"max_length": 64})
    longer = paper(**ALONE)
    longer.benchmarks[LETTERS] = longer.benchmarks[LETTERS].model_copy(update={"max_length": 256})
    gd = LETTERS, "gd", "unconstrained"
    through_memory, arithmetic = 10_000 * 2 * 4 * 61 / 2500, read(10_000 * 4 * 256 * 4)
    assert read(10_000 * 4 * 64 * 4) < through_memory < arithmetic
    difference = seconds(longer, "unlearn", *gd) - seconds(project, "unlearn", *gd)
    assert difference == pytest.approx(arithmetic - through_memory)


def test_what_runs_through_every_layer_by_hand():
    """RMU stops at layer 7 of 48 and trains as many, but where a penalty compares what all see; checks do not. Method B
    within a check reads the retain documents."""
    plain = seconds(paper(**ALONE), "unlearn", LETTERS, "gd", "unconstrained")
    trained = read(10_000 * 4 * 512 * 4)
    fewer = 40 / 48 * (10_000 * 2 * 29 * (2 + 2 + 2) / 2500 + 9 * 29 * 2)
    rmu = [seconds(paper(**ALONE), "unlearn", LETTERS, "rmu", method) for method in ("unconstrained", "anchored")]
    assert rmu == pytest.approx([plain - trained * 40 / 48 - fewer, plain])
    matched = seconds(paper(**ALONE), "unlearn", LETTERS, "gd", "ptc_matched")
    assert matched == pytest.approx(plain + read(201 * 64 * 512))
    assert tokens(paper(), "realign", LETTERS, "gd", "ptc") == pytest.approx(64 * 512)
    assert tokens(paper(), "trace_routing", LETTERS) == pytest.approx(2 * 64 * 512)


def test_bases_beyond_their_memory_come_to_the_gpu_in_every_step(tmp_path):
    """26 GB of which 16 stay: 10 come from host memory, or those that it does not hold from disk; both GPUs wait."""
    write_json(tmp_path / LARGE / LETTERS / "bases" / "expert_specific.json", {"basis_megabytes": 26_000.0})

    def took(project, results):
        methods = "expert_specific", "unconstrained"
        return [seconds(project, "unlearn", LETTERS, "gd", method, results=results) for method in methods]

    for on_host, each in ((64, 1.0), (4, 0.4 + 6), (0, 10)):
        held, plain = took(paper(basis_host_memory=on_host), tmp_path)
        assert held - plain == pytest.approx(2 * 10_000 * each)
    held, plain = took(paper(basis_memory=26), tmp_path)
    assert held == pytest.approx(plain)
    held, plain = took(paper(basis_host_memory=64), None)
    beyond = 48 * 128 * 2048 * 2048 * 4 / 1e9 - 16
    assert held - plain == pytest.approx(2 * 10_000 * (64 / 10 + beyond - 64)), "at most"


def test_the_papers_bases_are_made_in_every_step():
    """Of 1,024 retain tokens the busiest expert serves 256, four times the even share: products of its tokens, and ten
    operations for each cube of their number."""
    paper_form = seconds(paper(**ALONE), "unlearn", LETTERS, "gd", "expert_specific_paper")
    plain = seconds(paper(**ALONE), "unlearn", LETTERS, "gd", "unconstrained")
    step = 48 * 128 * (10 * 256**3 / 1e12 + 4 * 256**2 * 2048 / 1e14)
    assert paper_form - plain == pytest.approx(10_000 * step) and 1 < step < 1.1
    both = [seconds(paper(), "unlearn", LETTERS, "gd", m) for m in ("expert_specific_paper", "unconstrained")]
    assert both[0] - both[1] == pytest.approx(2 * 10_000 * step), "each process makes them of all tokens"
    project = paper(**ALONE)
    tracked = Project(CONFIG, "tiny_all").methods["expert_specific_tracked"]
    project.methods["expert_specific_paper"] = tracked
    wide = seconds(project, "unlearn", LETTERS, "gd", "expert_specific_paper") - plain
    assert wide == pytest.approx(10_000 * 48 * 128 * (10 * 2048**3 / 1e12 + 4 * 2048**3 / 1e14))


def test_bases_are_fitted_on_sixteen_cores(tmp_path):
    """Of each of 6,144 experts the QR of 8,000 tokens and an SVD of 2048 by 2048, 2e10 operations a second and core; of
    a layer as a whole a 128th."""
    write_json(tmp_path / LARGE / LETTERS / "routing.json", {"retain_tokens": 8000, "forget_tokens": 4000})
    project = paper()
    each = (5 * 8000 + 20 * 2048) * 2048**2
    fitted = Step(LARGE, "fit_basis", LETTERS, method="expert_specific")
    assert hours_needed(project, fitted, tmp_path) == pytest.approx(48 * 128 * each / 2e10 / 16 / 3600)
    wide = Step(LARGE, "fit_basis", LETTERS, method="full_null_space")
    assert hours_needed(project, wide, tmp_path) == pytest.approx(48 * each / 2e10 / 16 / 3600)
    assert (fit_threads(project, LARGE), fit_threads(changed("tiny"), "tiny_a")) == (16, 1)


def test_evaluation_by_hand():
    """Two thirds of WMDP-Cyber, all of MMLU, 2,000 questions below five others, twelve options of TruthfulQA's 817, and
    250 documents six times."""
    asked = (1987 * 2 / 3 + 14_042 + 2000 * 6) * 150 + 817 * 12 * 250 + 6 * 250 * 512
    assert tokens(paper(), "evaluate", LETTERS, "gd", "anchored") == pytest.approx(asked)


def test_attacks_by_hand_grow_with_the_models_own_layers():
    """24 more layers: six more passes of the sample for each. Relearning trains all parameters in one process; it is
    left out where a world leaves it out."""
    forcing, probes = 10 * 1987 * 2 / 3 + 2 * 1000, 4 * 1987 / 3 + 2 * 240
    sample = 240 * (6 * 48 + 5 + 6 + 8 + 8 + 5)
    asked = read((forcing + probes + sample) * 150)
    relearned = 40 * (read(4 * 512 * 4) + 2 * (2 * 61 + 61) / 2500)
    cell = LETTERS, "gd", "anchored"
    assert seconds(paper(**ALONE), "attack", *cell) == pytest.approx(asked + relearned)
    without = changed("paper", relearning=None)
    assert seconds(without, "attack", *cell) == pytest.approx(asked - read(240 * 8 * 150))
    smaller = tokens(without, "attack", *cell, model=SMALLER, active=2.7e9)
    assert tokens(without, "attack", *cell) - smaller == pytest.approx(240 * 6 * 24 * 150)


def test_finetuning_by_hand_goes_through_its_epochs():
    """Of 889 articles to forget, 1,777 to retain and 1,778 held out, 32 in a step, 4,000 tokens at once on each GPU;
    its oracle not of the first."""
    project = changed("paper_muse")
    oracle = f"{LARGE}_news_oracle"

    def by_hand(articles, epochs):
        gathered = 2 * 4 * 32 * 900 / 2 / 4000 * GATHERED
        adamw = 2 * 2 * (2 * 32 + 32) / 2500
        return epochs * articles / 32 * (read(32 * 900 * 4) + gathered + adamw)

    for name, articles in ((f"{LARGE}_news", 889 + 1777 + 1778), (oracle, 1777 + 1778)):
        assert seconds(project, "finetune_model", model=name) == pytest.approx(by_hand(articles, 5))
    project.models[oracle] = project.models[oracle].model_copy(update={"epochs": 10})
    assert seconds(project, "finetune_model", model=oracle) == pytest.approx(by_hand(3555, 10))


def test_news_by_hand():
    """Recited 128 tokens and answered 32, each as long as 50 that are read below a prompt of 500, sixteen texts at
    once; of processes that share experts each token takes them from one GPU to the other."""
    project, cell = changed("paper_muse"), ("muse_news", "gd", "unconstrained")
    recited, answered = 500 + 128 * 50, 500 + 32 * 50
    check = 100 / 3 * (recited + answered) + 20 * answered
    passes = 100 / 3 / 16 * (128 + 32) + 20 / 16 * 32
    trained = read(10_000 * 4 * 2048 * 4) + 2 * 10_000 * (2 * 4 * GATHERED + 2 * (2 * 29 + 29) / 2500)
    saved = 9 * (2 * (2 * 1.5 + 29) + 29 * 2)
    news = f"{LARGE}_news"
    assert seconds(project, "unlearn", *cell, model=news) == pytest.approx(
        trained + 2 * (checked(tokens=check, passes=passes, gathered=GATHERED) + saved)
    )
    asked = 200 / 3 * (recited + 2 * answered) + 200 * 2048 + (4 * 1778 + 2 * 889) * 900
    assert tokens(project, "evaluate", *cell, model=news) == pytest.approx(asked)
    forced = 6 * 200 / 3 * (recited + answered)
    recalls = (6 * 48 + 5 + 6 + 4) * 32 * answered
    project.world = project.world.model_copy(update={"gpus": {}})
    relearned = 20 * (read(4 * 2048 * 4) + 2 * (2 * 61 + 61) / 2500)
    assert seconds(project, "attack", *cell, model=news) == pytest.approx(read(forced + recalls) + relearned)


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
    assert hours.PASS == inspect.signature(direct_answers).parameters["tokens_per_forward"].default
    assert (hours.PASS, hours.PROMPTS_PASS) == (corpora.TOKENS_PER_BATCH, muse.TOKENS_PER_PASS)
    assert memory.SCORED == muse.TOKENS_PER_PASS // 2
    assert (hours.SHOTS, hours.LONGEST_SCORED) == (general.SHOTS, muse.MAX_SCORED_TOKENS)
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
