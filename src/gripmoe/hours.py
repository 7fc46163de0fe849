"""How long a step of a published model takes, by arithmetic: the tokens that pass through it, at a fixed rate, and of
training what its weights, experts of other GPUs, checkpoints and bases take on their way.

What is asked stands here again as numbers, since what asks it imports torch; a test holds them equal. Lengths of texts
are guesses. A pass through all layers of a token counts one, with its backward pass three.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gripmoe.catalogue import Benchmark
from gripmoe.disk import checkpoint_bytes
from gripmoe.holdings import layers_run, may_idle
from gripmoe.memory import (
    BYTES_WEIGHT,
    GB,
    Step,
    bases_beyond,
    bases_of,
    needed,
    sizes_of,
    traced_tokens,
    widths_of,
)
from gripmoe.project import Project

FLOPS = 1.0e14  # a second of one GPU in eager MoE code, a tenth of what an H100 or H200 can do in bf16
BANDWIDTH = 2.5e12  # bytes a second of its memory, three quarters of an H100's
LINK = 2.0e11  # bytes a second from the other GPUs of its node, by NVLink; by PCIe a tenth
NETWORK = 2.5e10  # bytes a second from those of other nodes
HOST = 1.0e10  # bytes a second from host memory whose pages are not locked, by PCIe
DISK = 1.0e9  # bytes a second that a job writes to the file system or reads from it
DECOMPOSED = 1.0e12  # flops a second of eigendecompositions of many small matrices on a GPU
CORE = 2.0e10  # flops a second of a CPU core, of QR and SVD in fp64
FIT_THREADS = 16  # of a job that fits the bases of a published model
SKEW = 4  # times the even share: tokens that the busiest expert of a layer serves
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
LONGEST_SCORED = 2048  # tokens of a text whose membership is asked, at most
PASS = 4000  # tokens that are read at once, but for documents of a training step
PROMPTS_PASS = 8000  # of prompts of news, below which is written


def hours_needed(project: Project, step: Step, results: Path | None = None) -> float:
    """Of a model of known size: for "finetune_model", "trace_routing", "unlearn", "realign", "evaluate" or "attack" of
    all GPUs on which processes train, else of one; for "fit_basis" of a machine."""
    return STEPS[step.what](project, step, results) / 3600


def fit_threads(project: Project, model: str) -> int:
    """Of a job that fits bases: the decompositions of a published model's take hours."""
    return FIT_THREADS if sizes_of(project, model) else 1


def _read(project: Project, step: Step, tokens: float) -> float:
    """Seconds in which so many tokens pass through all layers, PASS or a batch of questions at once: enough for
    arithmetic to take longer than the weights' way through memory."""
    return tokens * 2 * sizes_of(project, step.model).active / FLOPS


def _trained(
    project: Project, step: Step, *, steps: float, batches: float, tokens: float, recomputed: bool, share: float = 1.0
) -> float:
    """GPU-seconds of training steps, each of so many tokens in so many batches, through a `share` of the layers.

    Of arithmetic and of the weights' way through memory the longer counts: every weight is read in a pass, since a
    batch chooses nearly all experts, and the backward pass writes as many gradients. Experts on other GPUs come before
    every pass, and gradients go there after the backward one. The optimizer reads and writes weights, gradients and
    states.
    """
    sizes, need, processes = sizes_of(project, step.model), needed(project, step), _processes(project, step)
    passes = share * (4 if recomputed else 3)  # forward, backward (two), and forward again where nothing is kept
    arithmetic = passes * _read(project, step, tokens) / processes
    memory = passes * batches * sizes.total * BYTES_WEIGHT / BANDWIDTH
    gathered = passes * batches * _gathered(project, step)
    optimizer = 2 * (2 * need.gradients + need.states) * GB / BANDWIDTH
    return steps * processes * (max(arithmetic, memory) + gathered + optimizer)


def _processes(project: Project, step: Step) -> int:
    together = step.what in ("unlearn", "finetune_model")
    return project.processes(step.model, step.method or None) if together else 1


def _gathered(project: Project, step: Step) -> float:
    """Seconds in which a GPU receives all experts that lie on others."""
    processes, nodes = _processes(project, step), project.nodes(step.model, step.method or None)
    others = sizes_of(project, step.model).blocks * (1 - 1 / processes)
    return others * BYTES_WEIGHT / (LINK if nodes == 1 else NETWORK)


def _rows(benchmark: Benchmark, name: str) -> int:
    return getattr(benchmark.data, "rows", {}).get(name, ROWS[name])


def _news(share: float, retain: float) -> float:
    """VerbMem and KnowMem of a share of the texts to forget, and KnowMem of so many to retain."""
    recited = share * TEXTS * (PROMPT + RECITED * WRITTEN)
    return recited + (share * TEXTS + retain) * (PROMPT + ANSWERED * WRITTEN)


def _finetuned(project: Project, step: Step, results: Path | None) -> float:
    model = project.models[step.model]
    benchmark = project.benchmarks[model.benchmark]
    names = [
        f"raw/{name}" for name in ("retain1", "retain2", "forget")[: 2 if model.trained_on == "retain_only" else 3]
    ]
    articles = sum(_rows(benchmark, name) for name in names)
    tokens = model.batch_size * ARTICLE
    return _trained(
        project,
        step,
        steps=model.epochs * articles / model.batch_size,
        batches=max(1.0, tokens / _processes(project, step) / PASS),
        tokens=tokens,
        recomputed=model.gradient_checkpointing,
    )


def _unlearned(project: Project, step: Step, results: Path | None) -> float:
    """Steps, what the method does in each, checks, which every process makes in full, and checkpoints."""
    training = project.training(step.objective, step.method, step.benchmark)
    benchmark, method = project.benchmarks[step.benchmark], project.methods[step.method]
    layers = sizes_of(project, step.model).layers
    share = layers_run(step.objective, training, sizes_of(project, step.model)) / layers
    trained = _trained(
        project,
        step,
        steps=training.max_steps,
        batches=2,
        tokens=(training.forget_batch_size + training.retain_batch_size) * benchmark.max_length,
        recomputed=training.gradient_checkpointing,
        share=share if may_idle(method, step.objective) else 1,
    )
    held = training.max_steps * (_bases_read(project, step, results) + _decomposed(project, step))
    tokens, passes = _check(benchmark)
    if method.correction == "realign":
        tokens += _corrected_tokens(benchmark)
    check = _read(project, step, tokens) + passes * _gathered(project, step)
    checks = (training.max_steps // training.check_every + 1) * check
    return trained + _processes(project, step) * (held + checks + checkpoint_bytes(project, step) / DISK)


def _bases_read(project: Project, step: Step, results: Path | None) -> float:
    """Seconds of a step in which sound Method A copies or reads the bases that its GPU does not hold."""
    copied, read = bases_beyond(project, bases_of(project, step, results))
    return copied / HOST + read / DISK


def _decomposed(project: Project, step: Step) -> float:
    """Seconds of a step in which bases are made of its retain tokens: for each expert of each layer the products of as
    many tokens as the busiest serves, and their eigenvectors; of bases that are tracked, of the hidden size."""
    method, widths = project.methods[step.method], widths_of(project, step.model)
    if method.basis not in ("minibatch", "tracked"):
        return 0.0
    training = project.training(step.objective, step.method, step.benchmark)
    tokens = training.retain_batch_size * project.benchmarks[step.benchmark].max_length
    rows = min(widths.hidden, SKEW * tokens * widths.chosen / widths.experts)
    if method.basis == "tracked":
        rows = widths.hidden
    each = 4 * rows**2 * widths.hidden / FLOPS + 10 * rows**3 / DECOMPOSED
    return sizes_of(project, step.model).layers * widths.experts * each


def _check(benchmark: Benchmark) -> tuple[float, float]:
    """Tokens that a check reads, and passes through the model."""
    if benchmark.is_news:
        asked = DEV * TEXTS, DEV * TEXTS, RETAIN_PAIRS
        groups = [max(1.0, texts * PROMPT / PROMPTS_PASS) for texts in asked]
        passes = sum(count * written for count, written in zip(groups, (RECITED, ANSWERED, ANSWERED), strict=True))
        return _news(DEV, RETAIN_PAIRS), passes
    tokens = (DEV * _rows(benchmark, "forget_questions") + RETAIN_QUESTIONS) * QUESTION
    return tokens, tokens / PASS


def _corrected_tokens(benchmark: Benchmark) -> int:
    """Of Method B's one pass."""
    return benchmark.retain_documents * benchmark.max_length


def _corrected(project: Project, step: Step, results: Path | None) -> float:
    return _read(project, step, _corrected_tokens(project.benchmarks[step.benchmark]))


def _traced(project: Project, step: Step, results: Path | None) -> float:
    """Documents to retain and as many to forget."""
    return 2 * _corrected(project, step, results)


def _fitted(project: Project, step: Step, results: Path | None) -> float:
    """Seconds on the job's threads: for each basis the QR of its tokens, a thousand at a time below a factor of as many
    rows as the hidden size, and the SVD of that."""
    widths, method = widths_of(project, step.model), project.methods[step.method]
    tokens = traced_tokens(project, step, results) * (2 if method.surface == "combined" else 1)
    bases = sizes_of(project, step.model).layers * (1 if method.granularity == "layer" else widths.experts)
    flops = bases * (5 * tokens + 20 * widths.hidden) * widths.hidden**2
    return flops / CORE / FIT_THREADS


def _evaluated(project: Project, step: Step, results: Path | None) -> float:
    """With the routing of both models, and of the unlearned one rounded, on held-out documents and, of both, on as
    many to forget."""
    benchmark = project.benchmarks[step.benchmark]
    if benchmark.is_news:
        routed = 4 * _rows(benchmark, "raw/retain2") + 2 * _rows(benchmark, "raw/forget")
        return _read(project, step, _news(1 - DEV, (1 - DEV) * TEXTS) + 2 * TEXTS * LONGEST_SCORED + routed * ARTICLE)
    asked = (1 - DEV) * _rows(benchmark, "forget_questions") + _rows(benchmark, "retain_questions")
    asked += (1 + SHOTS) * min(benchmark.few_shot_questions, _rows(benchmark, "retain_questions"))
    truths = _rows(benchmark, "truthfulqa") * TRUTHS * TRUTH
    return _read(project, step, asked * QUESTION + truths + 6 * HELD_OUT * benchmark.max_length)


def recalls(layers: int) -> int:
    """How often restoration asks the sample, at most (routers and experts of each layer, put back and transplanted; two
    experts of each; all, none), disturbed and wider routers (two passes each), and rounded weights."""
    return (6 * layers + 5) + 4 + 2


def _attacked(project: Project, step: Step, results: Path | None) -> float:
    """Forced experts (of news six times, while it is written); probes, whose dev questions pass four times; prompts;
    and what asks a sample again and again."""
    benchmark, settings = project.benchmarks[step.benchmark], project.world.relearning
    asked, trained = recalls(sizes_of(project, step.model).layers), 0.0
    if settings:
        curves = 1 if benchmark.is_news else 2
        asked += curves * RELEARNING_CHECKS
        trained = _trained(
            project,
            replace(step, what="relearning"),
            steps=curves * RELEARNING_STEPS,
            batches=1,
            tokens=settings.batch_size * benchmark.max_length,
            recomputed=settings.gradient_checkpointing,
        )
    if benchmark.is_news:
        tokens = 6 * _news(1 - DEV, 0) + asked * PAIRS * (PROMPT + ANSWERED * WRITTEN)
        return _read(project, step, tokens) + trained
    forget = _rows(benchmark, "forget_questions")
    questions = FORCED * (1 - DEV) * forget + FORCED_RETAIN * RETAIN_SAMPLE + 4 * DEV * forget + 2 * SAMPLE
    questions += SAMPLE * (asked + PROMPTS + SHOTS + len(benchmark.rewrites))
    return _read(project, step, questions * QUESTION) + trained


STEPS = {
    "finetune_model": _finetuned,
    "trace_routing": _traced,
    "fit_basis": _fitted,
    "unlearn": _unlearned,
    "realign": _corrected,
    "evaluate": _evaluated,
    "attack": _attacked,
}
