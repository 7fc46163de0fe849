"""The cost of a step of a published model, measured on fake tensors with three and with four layers: the difference is
the cost of one layer. If several first layers differ from the rest, both measurements include them. Measurements are
stored beside the results. torch is imported only for new measurements."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.models import PublishedModel
from gripmoe.config.project import Project
from gripmoe.config.provenance import package_versions
from gripmoe.config.world import RunKey
from gripmoe.io.files import read_json, write_json
from gripmoe.planning.workload import Workload

GB = 1e9
TFLOPS = 50.0  # measured: steps of OLMoE and Qwen1.5-MoE on an H200, whose dense bf16 rate is 989 (docs/cost.md)
# Bytes a second from other GPUs by NVLink, and from host memory.
LINK, HOST = 2.0e11, 1.0e10
FEWEST = 3  # layers to measure: with two, FSDP does not yet hold the neighbours of a layer
PROMPT = 3000  # tokens of the longest letter prompt: five-shot MMLU
QUESTION = 115  # mean tokens of a letter question of WMDP and MMLU
TEXTS = (2, 2000)  # news: rows and tokens of a pass for membership inference
ARTICLE = 900  # tokens of an article for finetuning
SAVING = ({"gradient_checkpointing": True}, {"optimizer": "adamw_8bit"})
MORE_GPUS = ({"gpus": 2}, {"gpus": 4}, {"gpus": 8})
CHANGES = {  # settings to try if a step does not fit
    "unlearn": (*SAVING, {"trained_layers": 3}, {"forget_batch_size": 1, "retain_batch_size": 1}, {"basis_memory": 4})
    + MORE_GPUS,
    "relearning": (*SAVING, {"batch_size": 1}, *MORE_GPUS),
    "undo": (*SAVING, {"batch_size": 1}, *MORE_GPUS),
    "finetune_model": (*SAVING, *MORE_GPUS),
    "evaluate": ({"evaluation_batch_size": 1}, *MORE_GPUS),
    "attack": MORE_GPUS,
}


@dataclass(frozen=True)
class Step:
    """A step of the workflow on a model. `what` is "unlearn" or "undo", with benchmark, objective and method, or the
    name of another rule. A rule that is no key of `CHANGES` costs what a forward pass of evaluation costs."""

    model: str
    what: str
    benchmark: str = ""
    objective: str = ""
    method: str = ""

    @classmethod
    def of_run(cls, what: str, key: RunKey) -> Step:
        """A step of a run: `what` is "unlearn" or "undo"."""
        return cls(key.model, what, key.benchmark, key.objective, key.method)

    @property
    def kind(self) -> str:
        return f"{self.model}, {self.name}"

    @property
    def name(self) -> str:
        return self.objective if self.what == "unlearn" else self.what


@dataclass(frozen=True)
class Cost:
    """The cost of one step: numbers of GPUs and of processes (each on one GPU); peak GB of each GPU by use, and of the
    host; TFLOP of each process; and seconds of waiting for experts and bases that are not on its GPU."""

    step: Step
    gpus: int
    processes: int
    parts: dict[str, float]
    host: float
    tflop: float
    waiting: float

    def seconds(self, tflops: float) -> float:
        """Seconds of a step, if each GPU does `tflops` TFLOP per second."""
        return self.tflop / tflops + self.waiting

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def fits(self, gpu_memory: float, host_memory: float) -> bool:
        return self.total <= gpu_memory and self.host <= host_memory


class Costs:
    """The costs of a world's steps. Earlier measurements are read from `cost.json` of its results."""

    def __init__(self, project: Project, results: Path):
        self.project, self._results, self._file = project, results, results / "cost.json"
        self._measured: dict[str, Any] = read_json(self._file) if self._file.exists() else {}
        self.unmeasured: dict[str, str] = {}  # why, by measurement
        self._code, self._costs = "", {}

    def varied(self, project: Project) -> Costs:
        """The costs of another project, sharing the measurements."""
        other = copy.copy(self)
        other.project, other._costs = project, {}
        return other

    def of(self, step: Step) -> Cost | None:
        """The cost of a step; None for an embedded model, for a published model that cannot be measured, and for one on
        the CPU."""
        if step not in self._costs:
            published = isinstance(self.project.trained_from(step.model), PublishedModel)
            workload = self._workload(step) if published and self.project.gpus(step.model) else None
            self._costs[step] = self._cost(step, workload) if workload and self._layers(workload) else None
        return self._costs[step]

    def flops_per_token(self, step: Step) -> float:
        """Operations per token of a forward pass in evaluation: letter questions of mean length, or texts of news."""
        workload = self._evaluation(step)
        if not workload["news"]:  # the longest prompt would overstate attention
            workload["length"] = QUESTION
        return self._of_model(workload)["flops"] / (workload["rows"][0] * workload["length"])

    def parameters(self, step: Step) -> float:
        return self._of_model(self._evaluation(step))["parameters"]

    def bases(self, step: Step) -> float:
        """GB of all bases of an "unlearn" step."""
        return self._of_model(self._workload(step))["basis"] / GB

    def checkpoint(self, step: Step) -> float:
        """GB of weights, optimizer states, and averages or growing bases that all processes of an "unlearn" step save,
        on however many GPUs."""
        workload = self._workload(step)
        of_model = self._of_model(workload)
        is_averaged, has_growing_bases = workload["training"]["average_decay"], workload["method"]["basis"] == "cached"
        averages = 2 * of_model["gradients"] if is_averaged else 0  # in fp32, of weights in bf16
        bases = of_model["basis"] if has_growing_bases else 0
        return workload["processes"] * (of_model["weights"] + of_model["states"] + averages + bases) / GB

    # From measurements to a cost

    def _cost(self, step: Step, workload: Workload) -> Cost:
        world, processes, models = self.project.world, workload["processes"], workload["models"]
        of_model = self._of_model(workload)
        cached = workload.get("method", {}).get("basis") == "cached"  # growing bases stay on the GPU
        on_gpu = of_model["basis"] if cached else min(of_model["basis"], world.basis_memory * GB)
        elsewhere = of_model["basis"] - on_gpu
        parts = {name: size / GB for name, size in self._parts(step, workload, on_gpu).items() if size > 0}
        host = models * 2 * of_model["parameters"] / GB
        if step.what == "unlearn":
            host += world.original_memory + min(elsewhere / GB, world.basis_host_memory)
        waiting = of_model["received"] / LINK + elsewhere / HOST / workload.get("every", 1)
        gpus = self.project.gpus(step.model)
        return Cost(step, gpus, processes, parts, processes * host, of_model["flops"] / 1e12, waiting)

    def _parts(self, step: Step, workload: Workload, bases: float) -> dict[str, float]:
        """Peak bytes of the first GPU, by use. The first GPU has the `bases`, and in one process also what the
        constraint keeps of all layers."""
        of_layers, first = (self._layers(workload)[name] for name in ("of_layers", "first"))
        layers = of_layers
        if workload["processes"] == 1:  # the GPUs share the layers
            layers = first + ceil((of_layers - first) / self.project.gpus(step.model))
        in_part = {name: min(count, layers) for name, count in workload["in_part"].items()}
        of_gpu = self._extrapolated(workload, {"layers": layers, **in_part})
        parts = {name: of_gpu[name] for name in ("weights", "gradients", "states")} | {"bases": bases}
        peak = max(of_gpu["passes"], of_gpu["update"]) + bases
        if step.what == "unlearn" and workload["processes"] == 1:  # several gather the model in host memory
            of_model = self._of_model(workload)
            kept, kept_of_gpu = (numbers["held"] - numbers["weights"] for numbers in (of_model, of_gpu))
            saving = self._extrapolated(self._evaluation(step), {"layers": layers})["saving"]
            peak = max(peak + kept - kept_of_gpu, saving + parts["gradients"] + bases + kept)
        parts["activations"] = peak - sum(parts.values())
        if step.what == "evaluate":  # the unlearned model answers alone, before the original loads
            parts["activations"] = max(0.0, parts["activations"] - parts["weights"])
        parts["weights"] *= workload["models"]
        return parts

    # What is measured

    def _workload(self, step: Step) -> Workload:
        project, model = self.project, self.project.models[step.model]
        if step.what == "unlearn":
            return self._any_step(step) | self._unlearning(step)
        if step.what == "finetune_model":
            training = {"optimizer": model.optimizer, "gradient_checkpointing": model.gradient_checkpointing}
            rows, length, processes = [model.batch_size], ARTICLE, project.processes(step.model)
        elif step.what == "undo":
            training = project.methods[step.method].undo.model_dump()
            rows, length, processes = [training["batch_size"]], project.benchmarks[step.benchmark].max_length, 1
        elif step.what == "relearning":
            training = project.world.relearning.model_dump()
            fitting = [name for name in project.world.benchmarks if project.fits(step.model, name)]
            length = max(project.benchmarks[name].max_length for name in fitting)
            rows, processes = [training["batch_size"]], 1
        else:
            return self._evaluation(step)
        return self._any_step(step) | {"rows": rows, "length": length, "training": training, "processes": processes}

    def _any_step(self, step: Step) -> Workload:
        model = self.project.trained_from(step.model).model_dump(mode="json")
        return {"model": model, "what": step.what, "processes": 1, "models": 1, "in_part": {}}

    def _evaluation(self, step: Step) -> Workload:
        """A forward pass. Evaluation and attacks have the original model in memory beside the unlearned one."""
        benchmark = self.project.benchmarks[step.benchmark or self.project.world.benchmarks[0]]
        rows, length = TEXTS if benchmark.is_news else (benchmark.evaluation_batch_size, PROMPT)
        if step.what == "attack" and not benchmark.is_news:
            rows = 1  # attacks ask without the harness, and a long prompt has a pass of its own
        models = 2 if step.what in ("evaluate", "attack") else 1
        asked = {"what": "evaluate", "rows": [rows], "length": length, "news": benchmark.is_news, "models": models}
        return self._any_step(step) | asked

    def _unlearning(self, step: Step) -> Workload:
        project, method = self.project, self.project.methods[step.method]
        training = project.training(step.model, step.benchmark, step.objective, step.method)
        processes = project.processes(step.model, step.method)
        passes = processes * training.gradient_accumulation
        in_part = {"run": training.objective["layer"] + 1} if "layer" in training.objective else {}
        if training.trained_layers:
            in_part["trained"] = training.trained_layers
        # Methods that differ only in these keys cost the same and share a measurement.
        one_step = {"max_steps": 1, "check_every": 1, "checkpoint_every": 1, "adversary_restart": 1}
        native = {"expert_precision": "native", "linear_precision": "native"}  # fp8 needs a GPU; its copies are small
        alike = {"correction": None, "retain_tokens": None, "training": {}, "every": 1}
        if method.eps_null:
            alike["eps_null"] = {"value": 1.0, "kind": method.eps_null.kind}
        else:
            alike["form"] = "sound"
        return {
            "processes": processes,
            "rows": [passes * training.forget_batch_size, passes * training.retain_batch_size],
            "length": project.benchmarks[step.benchmark].max_length,
            "in_part": in_part,
            "every": method.every,
            "traced": self._traced(step) if method.constraint == "null_space" else 1,
            "objective": project.objectives[step.objective].path,
            "method": method.model_dump(mode="json") | alike,
            "training": {**training.model_dump(mode="json"), **one_step, **native},
        }

    def _traced(self, step: Step) -> int:
        """Tokens of the traces for a null space: as recorded, or an upper bound."""
        digest = self._results / step.model / step.benchmark / "routing.json"
        benchmark = self.project.benchmarks[step.benchmark]
        recorded = read_json(digest) if digest.exists() else {}
        at_most = benchmark.retain_documents * benchmark.max_length
        sides = self.project.methods[step.method].sides
        return sum(recorded.get(f"{side}_tokens", at_most) for side in sides)

    # Measurements at few layers

    def _layers(self, workload: Workload) -> dict[str, int]:
        """The result of `layers_of`; empty if the published model cannot be measured."""
        return self._stored("layers_of", workload["model"], FEWEST)

    def _of_model(self, workload: Workload) -> dict[str, float]:
        """The measurement, extrapolated to all layers."""
        return self._extrapolated(workload, {"layers": self._layers(workload)["of_layers"], **workload["in_part"]})

    def _extrapolated(self, workload: Workload, wanted: dict[str, int]) -> dict[str, float]:
        """The measurement for the `wanted` counts: "layers", and layers that "run" and are "trained". Every number is
        linear in each count. So each count is increased by one in turn, and the difference is extrapolated."""
        first = self._layers(workload)["first"]
        few = {name: FEWEST if name == "trained" else FEWEST + first for name in wanted}  # the last layers train
        before = self._measure(workload, few)
        extrapolated, counts = dict(before), few
        for name, count in wanted.items():
            counts = {**counts, name: few[name] + 1}
            after = self._measure(workload, counts)
            for key, value in after.items():
                extrapolated[key] += (count - few[name]) * (value - before[key])
            before = after
        return extrapolated

    def _measure(self, workload: Workload, counts: dict[str, int]) -> dict[str, float]:
        """The result of `measure` for few layers."""
        asked = {key: value for key, value in workload.items() if key not in ("models", "in_part", "every")}
        asked["layers"] = counts["layers"]
        if "run" in counts:
            objective = {**asked["training"]["objective"], "layer": counts["run"] - 1}
            asked["training"] = {**asked["training"], "objective": objective}
        if "trained" in counts:
            asked["training"] = {**asked["training"], "trained_layers": counts["trained"]}
        return self._stored("measure", asked)

    def _stored(self, name: str, *asked: Any) -> dict[str, Any]:
        """The result of a function of `fake`, or the stored one; empty if the model cannot be measured."""
        entry = "gripmoe.planning.fake:layers_of"  # it calls `measure`
        self._code = self._code or code_fingerprint(entry) + str(package_versions(("torch", "transformers", "torchao")))
        key = hashlib.sha256(json.dumps([self._code, name, *asked], sort_keys=True).encode()).hexdigest()[:16]
        if key in self.unmeasured:
            return {}
        if key not in self._measured:
            from gripmoe.planning import fake

            try:
                self._measured[key] = getattr(fake, name)(*asked)
            except fake.NotMeasurable as error:
                self.unmeasured[key] = str(error)
                return {}
            stored = read_json(self._file) if self._file.exists() else {}  # another plan may have written there
            self._measured.update(stored | self._measured)  # in place: the costs of varied projects share it
            write_json(self._file, self._measured)
        return self._measured[key]


def steps_of(project: Project) -> list[Step]:
    """Of every published model of a world: evaluation and attacks, finetuning, relearning, every objective under every
    method that trains, and UNDO's distillation."""
    steps = []
    for name in project.world.models:
        if isinstance(project.trained_from(name), PublishedModel) and project.gpus(name):
            asked = [benchmark for benchmark in project.world.benchmarks if project.fits(name, benchmark)]
            steps += [Step(name, what, benchmark) for benchmark in asked for what in ("evaluate", "attack")]
            steps += [Step(name, "finetune_model")] * (project.models[name].source == "finetuned")
            steps += [Step(name, "relearning")] * bool(project.world.relearning)
            runs = [(key, project.methods[key.method]) for key in project.run_keys() if key.model == name]
            steps += dict.fromkeys(Step.of_run("unlearn", key) for key, method in runs if method.trains)
            steps += dict.fromkeys(Step.of_run("undo", key) for key, method in runs if method.undo)
    return steps


def what_would_fit(costs: Costs, step: Step, gpu_memory: float, host_memory: float) -> Iterator[str]:
    """Tries changes of settings one at a time. Yields those that make the step fit."""
    for change in CHANGES[step.what]:
        try:
            cost = costs.varied(_changed(costs.project, step, change)).of(step)
        except ValueError:  # for example, processes that cannot share a batch
            continue
        if cost.fits(gpu_memory, host_memory):
            yield f"{', '.join(f'{key}: {json.dumps(value)}' for key, value in change.items())} ({cost.total:.0f} GB)"


def _changed(project: Project, step: Step, change: dict[str, Any]) -> Project:
    """The project with changed settings of the step's world, benchmark, model or training."""
    changed, world = copy.copy(project), project.world
    if "gpus" in change:
        update = {"gpus": {**world.gpus, step.model: change["gpus"]}}
    elif "basis_memory" in change:
        update = change
    elif step.what == "relearning":
        update = {"relearning": world.relearning.model_copy(update=change)}
    elif step.what == "undo":
        method = project.methods[step.method]
        settings = method.undo.model_copy(update=change)
        changed.methods = {**project.methods, step.method: method.model_copy(update={"undo": settings})}
        return changed
    elif step.what == "finetune_model":
        changed.models = {**project.models, step.model: project.models[step.model].model_copy(update=change)}
        return changed
    elif step.what == "unlearn":
        of_objective = {**world.objective_training[step.objective], **change}
        update = {"objective_training": {**world.objective_training, step.objective: of_objective}}
    else:
        benchmark = project.benchmarks[step.benchmark].model_copy(update=change)
        changed.benchmarks = {**project.benchmarks, step.benchmark: benchmark}
        return changed
    changed.world = world.model_copy(update=update)
    return changed
