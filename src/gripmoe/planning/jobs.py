"""The remaining jobs of a world, their hours and memory. Times come from the provenance of steps that have run, or
from the operations of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gripmoe.config.project import Project
from gripmoe.config.world import RunKey
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json
from gripmoe.planning.cost import GB, TFLOPS, Cost, Costs, Step

TINY_MEMORY = 1.0  # GB of host memory for a step with an embedded model
TINY_SECONDS = {
    "prepare_model": 480,
    "finetune_model": 120,
    "trace_routing": 7,
    "fit_basis": 9,
    "unlearn": 55,
    "realign": 5,
    "evaluate": 20,
    "attack": 45,
    "edit_weights": 5,
    "import_checkpoint": 5,
}  # two laptop cores
UNKNOWN_HOURS = 0.5  # of jobs without a GPU, and of a published model that cannot be measured
# Tokens of the published benchmarks. For news, a generated token counts as 50 tokens that are read.
TOKENS = {
    "letters": {"check": 1.2e5, "evaluate": 5e6, "attack": 1.4e7},
    "news": {"check": 4e5, "evaluate": 9e6, "attack": 2.4e7},
}


@dataclass(frozen=True)
class Job:
    """A job that has not run: its hours (summed over its GPUs, if it has any), whether they come from a record, its
    number of GPUs, and the GB that it needs on each GPU, or in host memory."""

    rule: str
    run: str
    hours: float
    recorded: bool
    gpus: int
    memory: float | None  # None for a published model that cannot be measured


RUN = "{}/{}/{}/{}/{}"
Parts = tuple  # the parts of a run's key that a step depends on
DATA = "data/{}/retain_corpus.jsonl"  # one of the files of `prepare_data` and `prepare_news`
OUTPUTS = {  # JSON by rule, below the results, from the parts that the step depends on
    **dict.fromkeys(("prepare_model", "finetune_model"), "models/{}/model"),
    "trace_routing": "{}/{}/routing",
    "fit_basis": "{}/{}/bases/{}",
    **dict.fromkeys(("unlearn", "realign", "edit_weights", "import_checkpoint"), f"{RUN}/checkpoint"),
    "evaluate": f"{RUN}/evaluation",
    "attack": f"{RUN}/attack",
}
COPYING = ("edit_weights", "import_checkpoint")  # rules that write a checkpoint without a forward pass


def jobs_left(project: Project, results: Path, tflops: float = TFLOPS, costs: Costs | None = None) -> list[Job]:
    """The jobs whose output is missing: base models, traces, bases; and for every run of the world, training or
    correction, evaluation and attack. Only Snakemake knows which outputs are out of date (`snakemake -n`)."""
    steps = []
    for key in project.run_keys():
        steps += [*shared_steps(project, key), *((rule, key) for rule in own_rules(project, key))]
    return jobs_of(project, results, [step for step in steps if not is_done(results, *step)], tflops, costs)


def jobs_of(
    project: Project,
    results: Path,
    steps: Iterable[tuple[str, Parts]],
    tflops: float = TFLOPS,
    costs: Costs | None = None,
) -> list[Job]:
    """The jobs of steps, each a rule and the parts that it depends on. Rules that take no time worth planning are left
    out."""
    costs = costs or Costs(project, results)
    return [_job(costs, results, rule, parts, tflops) for rule, parts in dict.fromkeys(steps) if rule in TINY_SECONDS]


def shared_steps(project: Project, key: RunKey) -> Iterator[tuple[str, Parts]]:
    """The steps that a run needs and shares with other runs, in order."""
    method = project.methods[key.method]
    yield from _models_of(project, key)
    yield "prepare_news" if project.benchmarks[key.benchmark].is_news else "prepare_data", (key.benchmark,)
    if not method.baseline:
        yield "trace_routing", (key.model, key.benchmark)
        if method.has_bases:
            yield "fit_basis", (key.model, key.benchmark, key.method)


def _models_of(project: Project, key: RunKey) -> Iterator[tuple[str, Parts]]:
    """The steps that make the models of a run: its original, what that is trained from, and the retrained model if it
    is needed."""
    retrained, needs = project.models[key.model].retrained, project.methods[key.method].baseline == "retrained"
    models = [key.model]
    if retrained and (needs or project.benchmarks[key.benchmark].is_news):
        models.append(retrained)
    for name in models:  # it grows
        models += [base for base in [project.models[name].made_from] if base]
    yield from ((_model_rule(project, name), (name,)) for name in reversed(models))


def own_rules(project: Project, key: RunKey) -> list[str]:
    """The rules that a run goes through alone, in order."""
    return [rule for rule in (project.methods[key.method].rule, "evaluate", "attack") if rule]


def is_done(results: Path, rule: str, parts: Parts) -> bool:
    pattern = f"{OUTPUTS[rule]}.json" if rule in OUTPUTS else DATA
    return (results / pattern.format(*parts)).exists()


def _model_rule(project: Project, name: str) -> str:
    return "finetune_model" if project.models[name].source == "finetuned" else "prepare_model"


def _job(costs: Costs, results: Path, rule: str, parts: Parts, tflops: float) -> Job:
    project, step = costs.project, _step(costs.project, rule, parts)
    embedded = project.trained_from(step.model).source == "embedded"
    cost = None if rule in COPYING else costs.of(step)
    recorded = _records(results, rule, parts, embedded or cost is None)
    gpus = cost.gpus if cost and rule not in ("prepare_model", "fit_basis") else 0
    if recorded:
        hours = max(gpus, 1) * fmean(record["seconds"] for record in recorded) / 3600
    elif embedded:
        hours = TINY_SECONDS[rule] / 3600
    else:
        hours = gpus * _seconds(costs, cost, tflops) / 3600 if gpus else UNKNOWN_HOURS
    if embedded:
        memory = max((record["peak_memory_gib"] * 2**30 / GB for record in recorded), default=TINY_MEMORY)
    elif cost and rule == "fit_basis":
        model, benchmark, method = parts
        memory = costs.bases(Step(model, "unlearn", benchmark, project.world.objectives[0], method))
    else:
        memory = cost and (cost.total if gpus else cost.host)
    return Job(rule, ".".join(map(str, parts)), hours, bool(recorded), gpus, memory)


def _step(project: Project, rule: str, parts: Parts) -> Step:
    """The step whose cost is that of a job."""
    if rule in ("unlearn", "realign"):
        key = RunKey(*parts)
        if rule == "unlearn":
            return Step.of_run(rule, key)
        if project.methods[key.method].undo:
            return Step.of_run("undo", key)
    return Step(parts[0], rule, *parts[1:2])


def _seconds(costs: Costs, cost: Cost, tflops: float) -> float:
    """Seconds of a whole job. GPUs that share the layers of one process work one after the other."""
    project, step, each = costs.project, cost.step, cost.seconds(tflops)
    if step.what == "finetune_model":
        model = project.models[step.model]
        rows = getattr(project.benchmarks[model.benchmark].data, "rows", {})
        sides = ("retain1", "retain2") if model.trained_on == "retain_only" else ("retain1", "retain2", "forget")
        return model.epochs * sum(rows.get(f"raw/{side}", 1500) for side in sides) / model.batch_size * each
    benchmark, token = project.benchmarks[step.benchmark], costs.flops_per_token(step) / 1e12 / tflops
    tokens = TOKENS["news" if benchmark.is_news else "letters"]
    if step.what == "unlearn":
        training = project.training(step.model, step.benchmark, step.objective, step.method)
        checks = training.max_steps // training.check_every + 1
        return training.max_steps * each + checks * tokens["check"] * token
    if step.what == "undo":
        return project.methods[step.method].undo.steps * each
    if step.what in ("trace_routing", "realign"):
        return 2 * benchmark.retain_documents * benchmark.max_length * token
    seconds, relearning = tokens[step.what] * token, project.world.relearning
    if step.what == "attack" and relearning:
        curves = 1 if benchmark.is_news else 2  # retain documents, and of letters forget documents
        seconds += curves * max(relearning.steps) * costs.of(Step(step.model, "relearning")).seconds(tflops)
    return seconds


def _records(results: Path, rule: str, parts: Parts, any_of_the_model: bool) -> list[dict]:
    """What the same run with another seed has recorded. Else, for evaluation and attacks, other runs with the same
    model and benchmark, whose times do not depend on the method. Else, with `any_of_the_model`, this rule on the same
    model. A record of the last part of an interrupted job does not count."""
    patterns = [RunKey(*parts)._replace(seed="*") if len(parts) == len(RunKey._fields) else parts]
    if rule in ("evaluate", "attack"):
        patterns.append((*parts[:2], "*", "*", "*"))
    if any_of_the_model:
        patterns.append((parts[0], *"*" * (len(parts) - 1)))
    for each in patterns:
        files = results.glob(f"{OUTPUTS[rule].format(*each)}.provenance.json")
        records = [record for record in map(read_json, files) if not record.get("resumed")]
        if found := [record for record in records if f".{rule}:" in record["step"]]:
            return found
    return []


def that_count(jobs: Sequence[Job]) -> Sequence[Job]:
    """The jobs that count for a plan's hours and for a budget: those on GPUs, or all jobs if none needs a GPU."""
    return [job for job in jobs if job.gpus] or jobs


def check_budget(jobs: Sequence[Job], budget: float | None) -> None:
    """Raises ConfigError, with the most expensive jobs, if all take more hours than `budget`."""
    counted = that_count(jobs)
    total = sum(job.hours for job in counted)
    if budget is not None and total > budget:
        worst = sorted(counted, key=lambda job: (-job.hours, job.rule, job.run))[:5]
        listed = "; ".join(f"{job.rule} {job.run} {job.hours:.2f} h" for job in worst)
        raise ConfigError(f"{total:.1f} hours exceed the budget of {budget:g}. Most expensive: {listed}")


def disk_needed(costs: Costs, at_once: int) -> dict[str, float]:
    """GB by use: weights of finished runs, base models, retain bases, and the largest checkpoints of `at_once` training
    jobs. Checkpoints count twice, because a job writes the next beside the last. Embedded models are left out."""
    project, sizes, bases, states = costs.project, {}, {}, []
    for name in dict.fromkeys(name for key in project.run_keys() for _, (name,) in _models_of(project, key)):
        if costs.of(Step(name, "evaluate")):
            sizes[name] = 2 * costs.parameters(Step(name, "evaluate")) / GB
    kept = [name for name, method in project.methods.items() if method.baseline not in ("original", "retrained")]
    keys = [key for key in project.run_keys() if key.model in sizes and key.method in kept]
    for key in keys:
        if project.methods[key.method].trains:
            step = Step.of_run("unlearn", key)
            states.append(costs.checkpoint(step))
            if project.methods[key.method].has_bases:
                bases[key.model, key.benchmark, key.method] = costs.bases(step)
    found = {
        "finished runs": sum(sizes[key.model] for key in keys),
        "base models": sum(sizes.values()),
        "bases": sum(bases.values()),
        "training": 2 * sum(sorted(states, reverse=True)[:at_once]),
    }
    return {name: size for name, size in found.items() if size}
