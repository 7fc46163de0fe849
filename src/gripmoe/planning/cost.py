"""What a step of a published model costs: measured on fake tensors at three and four layers, of which the difference is
one layer, and kept beside the results. Imports torch only where something has to be measured."""

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
from gripmoe.config.grid import Project
from gripmoe.config.models import PublishedModel
from gripmoe.config.provenance import package_versions
from gripmoe.io.files import read_json, write_json

GB = 1e9
# A tenth (ours: batches are small) of the dense bf16 rate of an H100 or H200 in its data sheet, 989; an A100's is 312.
TFLOPS = 98.9
# Bytes a second from other GPUs by NVLink, and from host memory.
LINK, HOST = 2.0e11, 1.0e10
FEWEST = 3  # layers that are measured: with two, FSDP does not yet hold what it holds of neighbours
PROMPT = 3000  # tokens of the longest letter prompt: below five questions of MMLU
TEXTS = (2, 2000)  # news: rows and tokens of a pass that asks for membership
ARTICLE = 900  # tokens of an article that a model is finetuned on
SAVING = ({"gradient_checkpointing": True}, {"optimizer": "adamw_8bit"})
MORE_GPUS = ({"gpus": 2}, {"gpus": 4}, {"gpus": 8})
VARIANTS = {  # what is tried where a step does not fit
    "unlearn": (*SAVING, {"trained_layers": 3}, {"forget_batch_size": 1, "retain_batch_size": 1}, {"basis_memory": 4})
    + MORE_GPUS,
    "relearning": (*SAVING, {"batch_size": 1}, *MORE_GPUS),
    "finetune_model": (*SAVING, *MORE_GPUS),
    "evaluate": ({"evaluation_batch_size": 1}, *MORE_GPUS),
    "attack": ({"evaluation_batch_size": 1}, *MORE_GPUS),
}


@dataclass(frozen=True)
class Step:
    """A step of a model: "unlearn" with benchmark, objective and method, or another key of `VARIANTS`."""

    model: str
    what: str
    benchmark: str = ""
    objective: str = ""
    method: str = ""

    @property
    def kind(self) -> str:
        return f"{self.model}, {self.objective or self.what}"


@dataclass(frozen=True)
class Cost:
    """Of one step: GPUs; processes, each on one of them; GB at the peak of each GPU, by what takes them, and of the
    host; TFLOP of each process; and seconds in which it waits for experts and bases that its GPU does not hold."""

    step: Step
    gpus: int
    processes: int
    parts: dict[str, float]
    host: float
    tflop: float
    waiting: float

    def seconds(self, tflops: float) -> float:
        """Of a step, at so many TFLOP a second of each GPU."""
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
        self._known: dict[str, Any] = read_json(self._file) if self._file.exists() else {}
        self._code, self._costs = "", {}

    def varied(self, project: Project) -> Costs:
        """Those of another project, with the same measurements."""
        other = copy.copy(self)
        other.project, other._costs = project, {}
        return other

    def of(self, step: Step) -> Cost | None:
        """None for an embedded model, and for a published one that cannot be measured."""
        if step not in self._costs:
            published = isinstance(self.project.trained_from(step.model), PublishedModel)
            question = self._question(step) if published else None
            self._costs[step] = self._cost(step, question) if question and self._layers(question) else None
        return self._costs[step]

    def _cost(self, step: Step, question: dict[str, Any]) -> Cost:
        world, gpus, processes = self.project.world, self.project.gpus(step.model), question["processes"]
        whole, own = self._whole(question), self._layers(question)
        if processes == 1:  # whose layers are split over its GPUs
            own = ceil(own / gpus)
        fewer = {name: min(count, own) for name, count in question["fewer"].items()}
        card = self._extrapolated(question, {"layers": own, **fewer})
        known = {name: card[name] for name in ("weights", "gradients", "states")}
        cached = question.get("method", {}).get("basis") == "cached"  # which all stay where the model is
        room = float("inf") if cached else world.basis_memory * GB
        known["bases"] = min(whole["basis"], room)
        peak = max(card["passes"], card["update"]) + known["bases"]
        if step.what == "unlearn" and processes == 1:  # several gather the model in host memory
            saving = self._extrapolated(self._reading(step), {"layers": own})["saving"]
            # What a constraint keeps of all layers lies on the first GPU, also while the model is written.
            kept, here = (numbers["held"] - numbers["weights"] for numbers in (whole, card))
            peak = max(peak + kept - here, saving + known["gradients"] + known["bases"] + kept)
        known["activations"] = peak - sum(known.values())
        if step.what == "evaluate":  # answers before the original comes
            known["activations"] -= known["weights"]
        known["weights"] *= question["models"]
        parts = {name: size / GB for name, size in known.items() if size > 0}
        host = question["models"] * 2 * whole["parameters"] / GB
        if step.what == "unlearn":
            beyond = max(0, whole["basis"] - room) / GB
            host += world.original_memory + min(beyond, world.basis_host_memory)
        waiting = whole["received"] / LINK + max(0, whole["basis"] - room) / HOST
        return Cost(step, gpus, processes, parts, processes * host, whole["flops"] / 1e12, waiting)

    def flops_per_token(self, step: Step) -> float:
        """Of a forward pass through all layers, in evaluation."""
        question = self._reading(step)
        return self._whole(question)["flops"] / (question["rows"][0] * question["length"])

    def parameters(self, step: Step) -> float:
        return self._whole(self._reading(step))["parameters"]

    def bases(self, step: Step) -> float:
        """GB of all bases of an "unlearn" step."""
        return self._whole(self._question(step))["basis"] / GB

    def _question(self, step: Step) -> dict[str, Any]:
        """What `measure` is asked of a step; and for how many `models`, and of which `fewer` layers some run or
        train."""
        project, model = self.project, self.project.models[step.model]
        if step.what == "unlearn":
            return self._asked(step) | self._unlearning(step)
        if step.what == "finetune_model":
            training = {"optimizer": model.optimizer, "gradient_checkpointing": model.gradient_checkpointing}
            rows, length, processes = [model.batch_size], ARTICLE, project.processes(step.model)
        elif step.what == "relearning":
            training = project.world.relearning.model_dump()
            fitting = [name for name in project.world.benchmarks if project.fits(step.model, name)]
            length = max(project.benchmarks[name].max_length for name in fitting)
            rows, processes = [training["batch_size"]], 1
        else:
            return self._reading(step)
        return self._asked(step) | {"rows": rows, "length": length, "training": training, "processes": processes}

    def _asked(self, step: Step) -> dict[str, Any]:
        model = self.project.trained_from(step.model).model_dump(mode="json")
        return {"model": model, "what": step.what, "processes": 1, "models": 1, "fewer": {}}

    def _reading(self, step: Step) -> dict[str, Any]:
        """A pass of evaluation; in evaluation and attacks of two models, the original beside the unlearned one."""
        benchmark = self.project.benchmarks[step.benchmark or self.project.world.benchmarks[0]]
        rows, length = TEXTS if benchmark.is_news else (benchmark.evaluation_batch_size, PROMPT)
        models = 2 if step.what in ("evaluate", "attack") else 1
        asked = {"what": "evaluate", "rows": [rows], "length": length, "news": benchmark.is_news, "models": models}
        return self._asked(step) | asked

    def _unlearning(self, step: Step) -> dict[str, Any]:
        project, method = self.project, self.project.methods[step.method]
        training = project.training_of(step.model, step.objective, step.method, step.benchmark)
        processes = project.processes(step.model, step.method)
        passes = processes * training.gradient_accumulation
        fewer = {"run": training.objective["layer"] + 1} if "layer" in training.objective else {}
        if training.trained_layers:
            fewer["trained"] = training.trained_layers
        settings = {"max_steps": 1, "check_every": 1, "checkpoint_every": 1}
        same = {"correction": None, "retain_tokens": None, "training": {}}  # whatever a row says, a step costs the same
        if method.eps_null:
            same["eps_null"] = {"value": 1.0, "kind": method.eps_null.kind}
        else:
            same["form"] = "sound"
        return {
            "processes": processes,
            "rows": [passes * training.forget_batch_size, passes * training.retain_batch_size],
            "length": project.benchmarks[step.benchmark].max_length,
            "fewer": fewer,
            "traced": self._traced(step) if method.constraint == "null_space" else 1,
            "objective": project.objectives[step.objective].path,
            "method": method.model_dump(mode="json") | same,
            "training": {**training.model_dump(mode="json"), **settings},
        }

    def _traced(self, step: Step) -> int:
        """Tokens of the traces that a null space constrains, as recorded or at most."""
        digest = self._results / step.model / step.benchmark / "routing.json"
        benchmark = self.project.benchmarks[step.benchmark]
        recorded = read_json(digest) if digest.exists() else {}
        at_most = benchmark.retain_documents * benchmark.max_length
        sides = self.project.methods[step.method].sides
        return sum(recorded.get(f"{side}_tokens", at_most) for side in sides)

    def _layers(self, question: dict[str, Any]) -> int:
        """Of the published model; 0 if it cannot be measured."""
        return int(self._at(question, dict.fromkeys(["layers", *question["fewer"]], FEWEST)).get("of_layers", 0))

    def _whole(self, question: dict[str, Any]) -> dict[str, float]:
        """Of all layers."""
        return self._extrapolated(question, {"layers": self._layers(question), **question["fewer"]})

    def _extrapolated(self, question: dict[str, Any], wanted: dict[str, int]) -> dict[str, float]:
        """The numbers of a model with so many layers, of which so many run and train: linear in each, by one more of
        each after the other."""
        point = dict.fromkeys(wanted, FEWEST)
        before = self._at(question, point)
        found = dict(before)
        for name, count in wanted.items():
            more = {**point, name: point[name] + 1}
            after = self._at(question, more)
            for key, value in after.items():
                found[key] += (count - point[name]) * (value - before[key])
            point, before = more, after
        return found

    def _at(self, question: dict[str, Any], point: dict[str, int]) -> dict[str, float]:
        """What `measure` says of a model with so few layers, or has said; nothing if it cannot."""
        asked = {key: value for key, value in question.items() if key not in ("models", "fewer")}
        asked["layers"] = point["layers"]
        if "run" in point:
            objective = {**asked["training"]["objective"], "layer": point["run"] - 1}
            asked["training"] = {**asked["training"], "objective": objective}
        if "trained" in point:
            asked["training"] = {**asked["training"], "trained_layers": point["trained"]}
        entry = "gripmoe.planning.fake:measure"
        self._code = self._code or code_fingerprint(entry) + str(package_versions(("torch", "transformers", "torchao")))
        key = hashlib.sha256(json.dumps([self._code, asked], sort_keys=True).encode()).hexdigest()[:16]
        if key not in self._known:
            from gripmoe.planning.fake import NotMeasurable, measure

            try:
                self._known[key] = measure(asked)
            except NotMeasurable:
                return {}
            write_json(self._file, self._known)
        return self._known[key]


def steps_of(project: Project) -> list[Step]:
    """Of every published model of a world: evaluation and attacks, finetuning, relearning, and every objective under
    every method that trains."""
    steps = []
    for name in project.world.models:
        if isinstance(project.trained_from(name), PublishedModel):
            asked = [benchmark for benchmark in project.world.benchmarks if project.fits(name, benchmark)]
            steps += [Step(name, what, benchmark) for benchmark in asked for what in ("evaluate", "attack")]
            steps += [Step(name, "finetune_model")] * (project.models[name].source == "finetuned")
            steps += [Step(name, "relearning")] * bool(project.world.relearning)
            keys = [key for key in project.run_keys() if key[0] == name and project.methods[key[3]].trains]
            steps += dict.fromkeys(Step(name, "unlearn", *key[1:4]) for key in keys)
    return steps


def what_would_fit(costs: Costs, step: Step, gpu_memory: float, host_memory: float) -> Iterator[str]:
    """The changes, tried one at a time, with each of which a step that does not fit would."""
    for change in VARIANTS[step.what]:
        try:
            cost = costs.varied(_changed(costs.project, step, change)).of(step)
        except ValueError:  # processes that cannot share a batch, say
            continue
        if cost.fits(gpu_memory, host_memory):
            yield f"{', '.join(f'{key}: {json.dumps(value)}' for key, value in change.items())} ({cost.total:.0f} GB)"


def _changed(project: Project, step: Step, change: dict[str, Any]) -> Project:
    """A project in which a step's world, benchmark, model or training has other settings."""
    changed, world = copy.copy(project), project.world
    if "gpus" in change:
        update = {"gpus": {**world.gpus, step.model: change["gpus"]}}
    elif "basis_memory" in change:
        update = change
    elif step.what == "relearning":
        update = {"relearning": world.relearning.model_copy(update=change)}
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
