"""How long a step of a published model takes, by arithmetic: the tokens that pass through it, at a fixed rate.

What is asked stands here again as numbers, since what asks it imports torch; a test holds them equal. Lengths of texts
are guesses. A pass through all layers of a token counts one, with its backward pass three.
"""

from __future__ import annotations

from gripmoe.catalogue import Benchmark
from gripmoe.memory import Step, layers_run, may_idle, sizes_of
from gripmoe.project import Project

FLOPS = 1.0e14  # of one GPU in eager MoE code, a tenth of what an H100 or H200 can do in bf16
ROWS = {  # of the published benchmarks, where the catalogue does not say
    "forget_questions": 1987,
    "retain_questions": 14_042,
    "truthfulqa": 817,
    "raw/forget": 889,
    "raw/retain1": 1777,
    "raw/retain2": 1778,
}
TEXTS = 100  # of news, in each of VerbMem and both parts of KnowMem
HELD_OUT = 250  # documents of WikiText
DEV = 1 / 3  # of questions and texts: what the stop rule asks
RETAIN_QUESTIONS, RETAIN_PAIRS = 120, 20  # asked at every check
SHOTS = 5
TRUTHS = 12  # options of a question of TruthfulQA, MC1's and MC2's
SAMPLE, RETAIN_SAMPLE, PAIRS = 240, 1000, 32  # of the attacks
FORCED, FORCED_RETAIN = 10, 2  # passes of a question, of both models and with controls
RELEARNING_STEPS, RELEARNING_CHECKS = 20, 4
PROMPTS = 8  # ways to put a question, one of them below solved ones
QUESTION, TRUTH, PROMPT, ARTICLE = 150, 250, 500, 900  # tokens: with options, with primer, of news with ten solved ones
RECITED, ANSWERED = 128, 32  # tokens that are written
WRITTEN = 50  # one of them takes as long as so many that are read, since they come one by one
SCORED = 2048  # tokens of a text whose membership is asked, at most


def hours_needed(project: Project, step: Step) -> float:
    """Of one GPU, for "finetune_model", "unlearn", "realign", "evaluate" or "attack" of a model of known size."""
    return STEPS[step.what](project, step) * 2 * sizes_of(project, step.model).active / FLOPS / 3600


def _passes(gradient_checkpointing: bool) -> int:
    """Of a token that is trained on: forward, backward (two), and forward again where activations are not kept."""
    return 4 if gradient_checkpointing else 3


def _rows(benchmark: Benchmark, name: str) -> int:
    return getattr(benchmark.data, "rows", {}).get(name, ROWS[name])


def _news(share: float, retain: float) -> float:
    """VerbMem and KnowMem of a share of the texts to forget, and KnowMem of so many to retain."""
    recited = share * TEXTS * (PROMPT + RECITED * WRITTEN)
    return recited + (share * TEXTS + retain) * (PROMPT + ANSWERED * WRITTEN)


def _finetuned(project: Project, step: Step) -> float:
    model = project.models[step.model]
    benchmark = project.benchmarks[model.benchmark]
    names = [
        f"raw/{name}" for name in ("retain1", "retain2", "forget")[: 2 if model.trained_on == "retain_only" else 3]
    ]
    articles = sum(_rows(benchmark, name) for name in names)
    return model.epochs * articles * ARTICLE * _passes(model.gradient_checkpointing)


def _unlearned(project: Project, step: Step) -> float:
    training = project.training(step.objective, step.method, step.benchmark)
    benchmark, method = project.benchmarks[step.benchmark], project.methods[step.method]
    layers = sizes_of(project, step.model).layers
    share = layers_run(step.objective, training, sizes_of(project, step.model)) / layers
    tokens = training.max_steps * (training.forget_batch_size + training.retain_batch_size) * benchmark.max_length
    passes = _passes(training.gradient_checkpointing) * (share if may_idle(method, step.objective) else 1)
    check = _check(benchmark) + (_corrected(project, step) if method.correction == "realign" else 0)
    return tokens * passes + (training.max_steps // training.check_every + 1) * check


def _check(benchmark: Benchmark) -> float:
    if benchmark.is_news:
        return _news(DEV, RETAIN_PAIRS)
    return (DEV * _rows(benchmark, "forget_questions") + RETAIN_QUESTIONS) * QUESTION


def _corrected(project: Project, step: Step) -> float:
    """Method B's one pass."""
    benchmark = project.benchmarks[step.benchmark]
    return benchmark.retain_documents * benchmark.max_length


def _evaluated(project: Project, step: Step) -> float:
    """With the routing of both models, and of the unlearned one rounded, on held-out documents and, of both, on as
    many to forget."""
    benchmark = project.benchmarks[step.benchmark]
    if benchmark.is_news:
        routed = 4 * _rows(benchmark, "raw/retain2") + 2 * _rows(benchmark, "raw/forget")
        return _news(1 - DEV, (1 - DEV) * TEXTS) + 2 * TEXTS * SCORED + routed * ARTICLE
    asked = (1 - DEV) * _rows(benchmark, "forget_questions") + _rows(benchmark, "retain_questions")
    asked += (1 + SHOTS) * min(benchmark.few_shot_questions, _rows(benchmark, "retain_questions"))
    truths = _rows(benchmark, "truthfulqa") * TRUTHS * TRUTH
    return asked * QUESTION + truths + 6 * HELD_OUT * benchmark.max_length


def recalls(layers: int) -> int:
    """How often restoration asks the sample, at most (routers and experts of each layer, put back and transplanted; two
    experts of each; all, none), disturbed and wider routers (two passes each), and rounded weights."""
    return (6 * layers + 5) + 4 + 2


def _attacked(project: Project, step: Step) -> float:
    """Forced experts (of news six times, while it is written); probes, whose dev questions pass four times; prompts;
    and what asks a sample again and again."""
    benchmark, settings = project.benchmarks[step.benchmark], project.world.relearning
    asked, trained = recalls(sizes_of(project, step.model).layers), 0
    if settings:
        curves = 1 if benchmark.is_news else 2
        asked += curves * RELEARNING_CHECKS
        documents = curves * RELEARNING_STEPS * settings.batch_size
        trained = documents * benchmark.max_length * _passes(settings.gradient_checkpointing)
    if benchmark.is_news:
        return 6 * _news(1 - DEV, 0) + asked * PAIRS * (PROMPT + ANSWERED * WRITTEN) + trained
    forget = _rows(benchmark, "forget_questions")
    questions = FORCED * (1 - DEV) * forget + FORCED_RETAIN * RETAIN_SAMPLE + 4 * DEV * forget + 2 * SAMPLE
    questions += SAMPLE * (asked + PROMPTS + SHOTS + len(benchmark.rewrites))
    return questions * QUESTION + trained


STEPS = {
    "finetune_model": _finetuned,
    "unlearn": _unlearned,
    "realign": _corrected,
    "evaluate": _evaluated,
    "attack": _attacked,
}
