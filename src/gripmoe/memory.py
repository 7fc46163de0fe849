"""What every step of a published model needs to hold, on each GPU and on the host.

Sizes that only files tell (tokens of a corpus, recorded tokens, fitted bases) are read from a world's results where
they are there, and are upper bounds before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path

from gripmoe.catalogue import PublishedModel, Sizes, Widths
from gripmoe.config import Training
from gripmoe.files import read_json
from gripmoe.holdings import (
    Tokens,
    basis_bytes,
    held_by_method,
    layers_run,
    layers_traced_at_once,
    layers_trained,
    may_idle,
    trace_bytes,
)
from gripmoe.project import Project

BYTES_WEIGHT, BYTES_GRADIENT = 2, 2  # bf16
# Two states in the dtype of the parameter, or in 8 bits, or in fp32 with what rounding has lost.
BYTES_STATES = {"adamw": 4, "adamw_8bit": 2, "adamw_fp32": 12}
BYTES_PER_TOKEN = 3  # of text, at least
LONGEST = 3000  # tokens of the longest prompt of letters: below five questions of MMLU
SCORED = 4000  # of news, in one pass, whose membership is asked
CONVERTED = 2 / 3  # of the experts: transformers writes gate and up projections apart, and cuts all before it writes
GB = 1e9


@dataclass(frozen=True)
class Step:
    """A step of a model: "unlearn" with benchmark, objective and method, or another of `STEPS`."""

    model: str
    what: str
    benchmark: str = ""
    objective: str = ""
    method: str = ""

    @property
    def kind(self) -> str:
        """Model and objective, or what else is done with it."""
        return f"{self.model}, {self.objective or self.what}"


@dataclass(frozen=True)
class Memory:
    """GB that a step needs on each of its GPUs (activations, and what a constraint makes and drops within a step, come
    on top), with the arithmetic, and `host` GB on each of its machines."""

    step: Step
    gpus: int
    weights: float
    gradients: float = 0.0
    states: float = 0.0
    held: float = 0.0  # by the method: bases, traces, copies of routers and of what must not change
    saving: float = 0.0  # copies of the weights that are written at the end, as far as they exceed the states
    logits: float = 0.0  # of the longest prompts that are read at once, and their log-softmax
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.states + self.held + self.saving + self.logits

    def fits(self, gpu_memory: float, host_memory: float) -> bool:
        return self.total <= gpu_memory and self.host <= host_memory


def memory_needed(project: Project, results: Path | None = None) -> list[Memory]:
    """Of every published model whose sizes are known: evaluation, and forced experts with the original beside it;
    tracing and fitting; finetuning on news and relearning, which train everything; every objective under every method.
    """
    needs = []
    for name in project.world.models:
        if sizes_of(project, name):
            cells = [cell for cell in project.cells() if cell[0] == name and project.methods[cell[3]].trains]
            asked = [benchmark for benchmark in project.world.benchmarks if project.fits(name, benchmark)]
            steps = [Step(name, what, benchmark) for benchmark in asked for what in ("evaluate", "forcing")]
            if project.models[name].source == "finetuned":
                steps.append(Step(name, "finetune_model"))
            if project.world.relearning:
                steps.append(Step(name, "relearning"))
            for _, benchmark, _, method, _ in cells:
                steps.append(Step(name, "trace_routing", benchmark))
                if project.methods[method].has_bases:
                    steps.append(Step(name, "fit_basis", benchmark, method=method))
            steps += [Step(name, "unlearn", *cell[1:4]) for cell in cells]
            needs += [needed(project, step, results) for step in dict.fromkeys(steps)]
    return needs


def needed(project: Project, step: Step, results: Path | None = None) -> Memory | None:
    """None for an embedded model, and for one whose sizes the catalogue does not give."""
    return STEPS[step.what](project, step, results) if sizes_of(project, step.model) else None


def sizes_of(project: Project, name: str) -> Sizes | None:
    model = project.trained_from(name)
    return model.parameters if isinstance(model, PublishedModel) else None


def widths_of(project: Project, name: str) -> Widths:
    config = project.models[name]
    return project.widths[config.base if config.source == "finetuned" else name]


def _models(count: int) -> Callable[..., Memory]:
    """A step that holds so many models, with their layers split over the GPUs of a node; each has come through host
    memory."""

    def need(project: Project, step: Step, results: Path | None) -> Memory:
        sizes, gpus = sizes_of(project, step.model), project.gpus_per_node(step.model)
        weights, whole = (parameters * BYTES_WEIGHT / GB for parameters in (sizes.split_over(gpus), sizes.total))
        return Memory(step, gpus, count * weights, host=count * whole)

    return need


def _prepared(project: Project, step: Step, results: Path | None) -> Memory:
    sizes = sizes_of(project, step.model)
    whole, copies = sizes.total * BYTES_WEIGHT / GB, CONVERTED * sizes.blocks * BYTES_WEIGHT / GB
    return Memory(step, 0, whole, saving=copies, host=whole + copies)


def _fitted(project: Project, step: Step, results: Path | None) -> Memory:
    """In host memory: bases; of one layer its trace, the triangular factor, its decomposition and a copy in fp64."""
    sizes, widths, method = sizes_of(project, step.model), widths_of(project, step.model), project.methods[step.method]
    tokens = traced_tokens(project, step, results)
    traces = layers_traced_at_once(method, sizes.layers) * trace_bytes(widths, 1, tokens)
    bases = basis_bytes(widths, sizes.layers, tokens, method)
    return Memory(step, 0, 0.0, host=(traces + bases + 8 * bases / sizes.layers) / GB)


def _corrected(project: Project, step: Step, results: Path | None) -> Memory:
    """Method B: one model, and of the trace of its original one layer; then it is written."""
    model, widths = _models(1)(project, step, results), widths_of(project, step.model)
    host = model.host + trace_bytes(widths, 1, traced_tokens(project, step, results)) / GB
    sizes = sizes_of(project, step.model)
    here = sizes.blocks * ceil(sizes.layers / model.gpus) / sizes.layers
    return replace(model, saving=CONVERTED * here * BYTES_WEIGHT / GB, host=host)


def _evaluated(project: Project, step: Step, results: Path | None) -> Memory:
    """One model that answers, and then the original beside it."""
    compared = _models(2)(project, step, results)
    answering = replace(compared, weights=compared.weights / 2, logits=_logits(project, step))
    return max(compared, answering, key=lambda need: need.total)


def _forced(project: Project, step: Step, results: Path | None) -> Memory:
    """Experts of a model that answers, with the original beside it."""
    return replace(_models(2)(project, step, results), logits=_logits(project, step))


def _logits(project: Project, step: Step) -> float:
    """GB on the GPU that has the output layer: of letters in bf16, twice; of news in bf16 and in fp32."""
    benchmark, vocabulary = project.benchmarks[step.benchmark], widths_of(project, step.model).vocabulary
    if benchmark.is_news:
        return SCORED * vocabulary * (2 + 4) / GB
    return benchmark.evaluation_batch_size * LONGEST * vocabulary * (2 + 2) / GB


def _attacked(project: Project, step: Step, results: Path | None) -> Memory:
    compared = _forced(project, step, results)
    if not project.world.relearning:
        return compared
    relearned = _trained_whole(project, step, results)
    return replace(max(compared, relearned, key=lambda need: need.total), host=compared.host)


def _trained_whole(project: Project, step: Step, results: Path | None) -> Memory:
    """Finetuning, in processes that share the experts, or relearning, in one; of every parameter."""
    sizes, on_node = sizes_of(project, step.model), project.gpus_per_node(step.model)
    if step.what == "finetune_model":
        settings, gpus, readers = project.models[step.model], project.gpus(step.model), on_node
        parameters = sizes.held_by(gpus)
    else:
        settings, gpus, readers = project.world.relearning, on_node, 1
        parameters = sizes.split_over(gpus)
    each = BYTES_WEIGHT, BYTES_GRADIENT, BYTES_STATES[settings.optimizer]
    host = readers * sizes.total
    if step.what == "finetune_model" and gpus > 1:  # the first gathers what they share
        host = max(host, sizes.total + CONVERTED * sizes.blocks)
    return Memory(step, gpus, *(parameters * part / GB for part in each), host=host * BYTES_WEIGHT / GB)


def _unlearned(project: Project, step: Step, results: Path | None) -> Memory:
    """Gradients and AdamW states of the MoE blocks that train; of a method that trains one expert, those of the fused
    tensors of its layer, and a copy of them. Every process reads the whole model, keeps what the method keeps, and
    the first gathers the whole model to write it; a single one cuts it where it lies, when the states are gone."""
    sizes, widths, method = sizes_of(project, step.model), widths_of(project, step.model), project.methods[step.method]
    nodes = project.nodes(step.model, step.method)
    gpus, readers = nodes * project.gpus_per_node(step.model), project.processes(step.model, step.method) // nodes
    training = project.training(step.objective, step.method, step.benchmark)
    tokens = tokens_of(project, step, training, results)
    bases = bases_of(project, step, results)
    copied, read = bases_beyond(project, bases)
    if copied or read:  # that of one layer is there beside those that stay
        bases = project.world.basis_memory * GB + bases / sizes.layers
    held = held_by_method(method, step.objective, sizes, widths, tokens, project.world.reference_memory * GB)
    held = replace(held, gpu=held.gpu + bases, host=held.host + copied)
    layers, block = layers_trained(method, step.objective, training, sizes), sizes.blocks / sizes.layers
    trained, copies = (block, BYTES_WEIGHT) if method.experts == "top_attributed" else (block * layers / gpus, 0)
    alone = project.processes(step.model, step.method) == 1
    run = layers_run(step.objective, training, sizes)
    idle = sizes.layers - run if alone and training.idle_layers == "host" and may_idle(method, step.objective) else 0
    here = ceil((sizes.layers - idle) / gpus)  # layers, if one process splits them
    if idle:  # one of them comes to the first GPU at a time
        weights = sizes.total - sizes.blocks + block * (here + 1)
    else:
        weights = sizes.split_over(gpus) if alone else sizes.held_by(gpus)
    states, written = trained * BYTES_STATES[training.optimizer], CONVERTED * block * BYTES_WEIGHT
    parts = (
        weights * BYTES_WEIGHT,
        trained * BYTES_GRADIENT,
        states,
        trained * copies + held.gpu,
        max(0, here * written - states - trained * copies) if alone else 0,
    )
    whole = sizes.total * BYTES_WEIGHT
    gathered = whole + (0 if alone else sizes.layers * written)
    host = max(readers * whole, readers * held.host + gathered) + idle * (block * BYTES_WEIGHT + written)
    return Memory(step, gpus, *(part / GB for part in parts), host=host / GB)


def bases_beyond(project: Project, bases: float) -> tuple[float, float]:
    """Bytes of bases that a GPU does not hold: those in host memory, and those that are read."""
    beyond = max(0.0, bases - project.world.basis_memory * GB)
    copied = min(beyond, project.world.basis_host_memory * GB)
    return copied, beyond - copied


STEPS = {
    "prepare_model": _prepared,
    "finetune_model": _trained_whole,
    "trace_routing": _models(1),
    "fit_basis": _fitted,
    "unlearn": _unlearned,
    "realign": _corrected,
    "evaluate": _evaluated,
    "forcing": _forced,
    "attack": _attacked,
    "relearning": _trained_whole,
}


def bases_of(project: Project, step: Step, results: Path | None) -> float:
    """Bytes of the bases of a method, as recorded or at most; none of a method that has none."""
    method = project.methods[step.method]
    digest = results and results / step.model / step.benchmark / "bases" / f"{step.method}.json"
    if not method.has_bases:
        return 0.0
    if digest and digest.exists():
        return read_json(digest)["basis_megabytes"] * 1e6
    layers, tokens = sizes_of(project, step.model).layers, traced_tokens(project, step, results)
    return basis_bytes(widths_of(project, step.model), layers, tokens, method)


def tokens_of(project: Project, step: Step, training: Training, results: Path | None) -> Tokens:
    """As recorded, or at most."""
    documents, tokens = {}, {}
    for side, size in (("retain", training.retain_batch_size), ("forget", training.forget_batch_size)):
        documents[side], tokens[side] = _corpus(project, step, f"{side}_corpus", size * training.max_steps, results)
    return Tokens(traced_tokens(project, step, results), tokens["retain"], tokens["forget"], documents["forget"])


def traced_tokens(project: Project, step: Step, results: Path | None) -> int:
    """Of the longer of both traces, as recorded or at most."""
    digest = results and results / step.model / step.benchmark / "routing.json"
    if digest and digest.exists():
        recorded = read_json(digest)
        return max(recorded["retain_tokens"], recorded["forget_tokens"])
    limit = project.benchmarks[step.benchmark].retain_documents
    return max(_corpus(project, step, f"{side}_corpus", limit, results)[1] for side in ("retain", "forget"))


def _corpus(project: Project, step: Step, corpus: str, limit: int, results: Path | None) -> tuple[int, int]:
    """Rows and tokens of at most `limit` rows of a corpus, at most: by the size of the file where it is there."""
    benchmark = project.benchmarks[step.benchmark]
    file = results and results / "data" / step.benchmark / f"{corpus}.jsonl"
    if not file or not file.exists():
        return limit, limit * benchmark.max_length
    size = file.stat().st_size
    if benchmark.is_news:  # long documents become several rows
        return limit, min(limit * benchmark.max_length, size // BYTES_PER_TOKEN)
    lines = _lines(file, file.stat().st_mtime_ns)
    rows = min(limit, lines)
    return rows, int(rows * min(benchmark.max_length, size / max(lines, 1) / BYTES_PER_TOKEN))


@cache
def _lines(file: Path, changed: int) -> int:
    with file.open("rb") as content:
        return sum(1 for _ in content)
