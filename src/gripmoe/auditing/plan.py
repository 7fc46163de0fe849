"""The plan of an audit: its measurements in order, and their times, from a timed batch or from a config.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gripmoe.attacks.base import RETAIN_SAMPLE, SAMPLE
from gripmoe.attacks.routers import SEARCHED, SILENCED, searched
from gripmoe.auditing import models
from gripmoe.auditing.inputs import OF_OTHER_FACTS, OWN, Inputs, settings_named, settings_of
from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.reading import require_known
from gripmoe.config.training import Relearning
from gripmoe.io.errors import ConfigError
from gripmoe.moe.families import has_experts
from gripmoe.planning.cost import FEWEST, GB, PROMPT, QUESTION, TFLOPS
from gripmoe.planning.workload import Workload

ATTACK_GROUPS = {  # by the names of --attacks, the most informative first
    "forcing": ("expert forcing",),
    "relearning": (
        *("relearning from retain documents", "relearning from other facts", "relearning by low-rank updates"),
        *("relearning of routers", "relearning from the corpus"),
    ),
    "restoration": ("restoration",),
    "routers": ("routers",),
    "search": ("routing search", "silenced experts"),
    "prompts": ("prompts",),
    "quantisation": ("quantisation",),
    "probes": ("probes", "probes of single experts"),
    "membership": ("membership",),
}
NEED_ROUTERS = (
    *("routing", "expert forcing", "routers", "routing search", "silenced experts", "probes of single experts"),
    *("relearning by low-rank updates", "relearning of routers"),
)
NOT_CHOSEN = "not chosen"
ASSUMED = 1000  # forget and retain questions of a plan without them


@dataclass(frozen=True)
class Sizes:
    """The numbers of questions by split, of texts, and of layers."""

    forget: int
    retain: int
    dev: int
    truths: int
    documents: int
    statements: int
    shots: int
    relearning: Relearning
    layers: int

    @classmethod
    def of(cls, files: Mapping[str, Sequence], benchmark: Benchmark, relearning: Relearning, layers: int) -> Sizes:
        """The sizes of the files of a data folder."""
        splits = [[row["split"] for row in files[f"{kind}_questions"]] for kind in ("forget", "retain")]
        counts = [splits[0].count("test"), splits[1].count("test"), splits[0].count("dev")]
        counts += [len(files[name]) for name in ("truthfulqa", "held_out_corpus", "membership")]
        return cls(*counts, benchmark.few_shot_questions, relearning, layers)


def measures_of(chosen: Sequence[str], unfit: Mapping[str, str], dense: bool) -> tuple[list[str], dict[str, str]]:
    """The measurements of an unlearned model in order, and by name why others are not made. `chosen` are keys of
    ATTACK_GROUPS; `unfit` says why some of them are impossible."""
    for name in chosen:
        require_known(name, ATTACK_GROUPS, "--attacks")
    listed = [
        "accuracy",
        "changes",
        "routing",
        *(name for key in ATTACK_GROUPS if key in chosen for name in ATTACK_GROUPS[key]),
    ]
    absent = {name: NOT_CHOSEN for key in ATTACK_GROUPS if key not in chosen for name in ATTACK_GROUPS[key]}
    absent |= {name: reason for name, reason in unfit.items() if name in listed}
    absent |= {name: "the model is dense" for name in NEED_ROUTERS if dense and name in listed}
    return [name for name in listed if name not in absent], absent


def relative_time(name: str, sizes: Sizes) -> float:
    """The time of a measurement, in units of one forget prompt (approximately)."""
    sample, relearning = min(SAMPLE, sizes.forget), sizes.relearning
    known = {
        "accuracy": sizes.forget + sizes.retain + 6 * min(sizes.shots, sizes.retain) + 20 * sizes.truths,
        "changes": 0,
        "routing": 4 * sizes.documents,
        "expert forcing": 12 * sizes.forget + 2 * min(RETAIN_SAMPLE, sizes.retain),
        "restoration": (8 * sizes.layers + 4) * sample,
        "routers": 3 * sample,
        "routing search": max(SEARCHED) * len(searched(sizes.dev)) + (1 + len(SEARCHED)) * sample,
        "silenced experts": (1 + len(SILENCED)) * sizes.dev + min(RETAIN_SAMPLE, sizes.retain) + sample,
        "prompts": 8 * sample + 8 * sizes.forget,
        "quantisation": 2 * sample,
        "probes": 2 * (sizes.dev + sample),
        "probes of single experts": 4 * (sizes.dev + sample),
        "membership": sizes.statements,
    }
    finetuned = (1 + len(relearning.steps)) * sample + max(relearning.steps) * 4 * relearning.batch_size
    return (known | dict.fromkeys(ATTACK_GROUPS["relearning"], finetuned))[name]


def plan_lines(turns: Sequence[tuple[str, str]], seconds: Mapping[str, float], absent: Mapping[str, str]) -> list[str]:
    """A line for each measurement with its time and models, one for each that is not made, and one with the sum."""
    lines = []
    for name in dict.fromkeys(name for _, name in turns):
        of = [model for model, other in turns if other == name]
        lines.append(f"{name:<34}{len(of) * seconds[name] / 60:8.1f} min  {', '.join(of)}")
    lines += [f"{name:<34}not made: {reason}" for name, reason in absent.items() if reason != NOT_CHOSEN]
    return [*lines, f"about {sum(seconds[name] for _, name in turns) / 60:.1f} minutes"]


def turns_of(listed: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
    """All (model, measurement) in order, for the models "original", "unlearned" and perhaps "retrained"."""
    attacked = [name for name in names if name != "original"]
    return [("original", "accuracy"), *((model, name) for name in listed for model in attacked)]


def plan_of(
    names: Mapping[str, str | Path],
    asked: str | Inputs | None,
    attacks: Sequence[str] | None,
    relearning: Mapping[str, Any] | None,
    trust_remote_code: bool = False,
) -> str:
    """The measurements, times and memory of an audit on one GPU, from the config.json of each model (`names` as in
    `models.find_all`), measured on fake tensors. `asked` names a benchmark, or has questions and texts of one's own;
    without it, ASSUMED forget and as many retain questions are assumed. Raises ConfigError for models that differ in
    more than weights, and for a model in fp32, for which torch has no fake grouped product."""
    found = models.find_all(names, trust_remote_code)["original"]
    config = found.config.get_text_config()
    benchmark, relearning, sizes, unfit = _sizes(asked, relearning, config.num_hidden_layers)
    if found.dtype == torch.float32:
        raise ConfigError(
            "--plan-only: the model is in fp32, of which torch has no fake products; start the audit itself"
        )
    chosen = list(ATTACK_GROUPS) if attacks is None else attacks
    listed, absent = measures_of(chosen, unfit, dense=not has_experts(config))
    turns = turns_of(listed, list(names))
    batch_size = benchmark.evaluation_batch_size
    # Fake products are in bfloat16 alone; float16 takes as much memory.
    model = {"model": {"id": str(found.folder), "revision": None, "config": None, "dtype": "bfloat16"}}
    read = {**model, "what": "evaluate", "processes": 1, "rows": [batch_size], "news": False}
    reading = _whole({**read, "length": PROMPT})  # the longest prompt takes most memory
    each = _whole({**read, "length": QUESTION})["flops"] / batch_size / 1e12 / TFLOPS
    seconds = {name: each * relative_time(name, sizes) for name in listed}
    device = reading["weights"] + reading["passes"]
    parts = [f"{reading['weights'] / GB:.1f} GB of weights", f"{device / GB:.1f} GB to ask two models side by side"]
    if set(ATTACK_GROUPS["relearning"]) & set(listed):
        step = {"what": "relearning", "rows": [relearning.batch_size], "length": benchmark.max_length, "processes": 1}
        training = _whole({**model, **step, "training": relearning.model_dump()})
        finetuned = max(relearning.steps) * training["flops"] / 1e12 / TFLOPS
        asked_again = each * (1 + len(relearning.steps)) * min(SAMPLE, sizes.forget)
        seconds |= {name: asked_again + finetuned for name in listed if name.startswith("relearning")}
        parts.append(
            f"{max(training['passes'], training['update']) / GB:.1f} GB to finetune one ({relearning.optimizer})"
        )
    lines = plan_lines(turns, seconds, absent)
    lines[-1] += f" on one GPU of {TFLOPS:g} TFLOP a second, without loading,"
    lines[-1] += f" for {sizes.forget + sizes.dev} forget and {sizes.retain} retain questions"
    host = len(names) * found.size
    return "\n".join([*lines, f"on the GPU: {', '.join(parts)}; in the machine: {host / GB:.1f} GB"])


def _sizes(
    asked: str | Inputs | None, given: Mapping[str, Any] | None, layers: int
) -> tuple[Benchmark, Relearning, Sizes, dict[str, str]]:
    """Benchmark, settings of relearning and sizes of what is `asked`, and by measurement why it cannot be made."""
    if isinstance(asked, Inputs):
        sizes = Sizes.of(asked.files, asked.benchmark, asked.relearning, layers)
        return asked.benchmark, asked.relearning, sizes, dict(asked.absent)
    row = settings_named(asked) if asked else OWN
    relearning, rows = settings_of(given, row), getattr(row.benchmark.data, "rows", {})  # which invented data lack
    questions = rows.get("forget_questions", ASSUMED)
    sizes = Sizes(
        forget=2 * questions // 3,
        retain=rows.get("retain_questions", ASSUMED),
        dev=questions - 2 * questions // 3,
        truths=rows.get("truthfulqa", 0),
        documents=200,
        statements=0,
        shots=row.benchmark.few_shot_questions,
        relearning=relearning,
        layers=layers,
    )
    unfit = dict.fromkeys(OF_OTHER_FACTS, "facts are not known") | {"membership": "no texts that no model has seen"}
    return row.benchmark, relearning, sizes, unfit


def _whole(workload: Workload) -> dict[str, float]:
    """The result of `measure` for all layers, extrapolated linearly from FEWEST alike ones and one more."""
    from gripmoe.planning.fake import layers_of, measure

    found = layers_of(workload["model"], FEWEST)
    least = found["first"] + FEWEST
    few, more = (measure({**workload, "layers": least + extra}) for extra in (0, 1))
    return {key: value + (found["of_layers"] - least) * (more[key] - value) for key, value in few.items()}
