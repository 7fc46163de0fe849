# The validated configuration, the layout of results/, and what several rules share. Nothing heavy is imported: every cluster
# job parses these files again.

import gc
import json
import re
from pathlib import Path

from snakemake.exceptions import WorkflowError

from gripmoe.io.errors import ConfigError
from gripmoe.io.imports import let_jobs_import_from
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.catalogues import own_code
from gripmoe.config.methods import Method
from gripmoe.config.project import Project
from gripmoe.config.world import NO_OBJECTIVE

# The graph of a large world is millions of objects that stay: garbage collection among them took an eighth of the time.
gc.set_threshold(500_000, 20, 100)

CONFIG = Path(workflow.basedir) / "workflow" / "config"

let_jobs_import_from(Path(workflow.basedir).resolve())  # code of one's own, which Snakemake finds there too

unknown_keys = sorted(set(config) - {"world", "budget", "partial"})
if unknown_keys:
    raise WorkflowError(f"--config: unknown key {unknown_keys[0]!r}; valid keys: world, budget, partial")
if str(config.get("partial", 0)) not in ("0", "1", "False", "True"):
    raise WorkflowError(f"--config partial={config['partial']}: give 1, or leave it out")
try:
    BUDGET = float(config["budget"]) if "budget" in config else None
    if BUDGET is not None and not 0 < BUDGET < float("inf"):
        raise ValueError
except (TypeError, ValueError):
    raise WorkflowError(f"--config budget={config['budget']}: give a number of hours above 0")
if config and "world" not in config:  # `--config` replaces the whole `config` of a profile
    raise WorkflowError(
        f"--config {' '.join(config)}: name the world too, as `--config world=paper {[*config][0]}=...`"
    )
if not config.get("world", "tiny"):
    raise WorkflowError("--config world=: give the name of a world, such as tiny")
try:
    PROJECT = Project(CONFIG, str(config.get("world", "tiny")))
except ConfigError as error:
    raise WorkflowError(str(error))

WORLD = PROJECT.world
RESULTS = str(PROJECT.results)  # a world that extends another shares its runs
LOGS = f"{RESULTS}/logs"
DATA = f"{RESULTS}/data/{{benchmark}}"
MODEL = f"{RESULTS}/models/{{model}}/model.json"
ROUTING = f"{RESULTS}/{{model}}/{{benchmark}}/routing"
BASES = f"{RESULTS}/{{model}}/{{benchmark}}/bases/{{method}}"
RUN = f"{RESULTS}/{{model}}/{{benchmark}}/{{objective}}/{{method}}/{{seed}}"
RUN_NAME = "{model}.{benchmark}.{objective}.{method}.{seed}"

NEWS = [name for name in WORLD.benchmarks if PROJECT.benchmarks[name].is_news]
PUBLISHED = any(PROJECT.models[name].source == "published" for name in PROJECT.models_needed)
ON_GPU = PUBLISHED or any(map(PROJECT.trains_on_gpu, PROJECT.models_needed))


def any_of(names):
    """A wildcard constraint that matches these names and, without any, nothing."""
    return "|".join(map(str, names)) or "(?!)"


wildcard_constraints:
    model=any_of(PROJECT.models_needed),
    benchmark=any_of(WORLD.benchmarks),
    objective=any_of([NO_OBJECTIVE, *WORLD.objectives]),
    method=any_of(WORLD.all_methods),
    seed=any_of(sorted({0, *WORLD.seeds})),


def methods_of(rule):
    """A wildcard constraint that matches the methods whose checkpoints a rule makes."""
    return any_of(name for name in WORLD.all_methods if PROJECT.methods[name].rule == rule)


def canonical(model, without=(), only=None):
    """A configuration object as one string, the same for every key order: a parameter that Snakemake tracks. A step does
    not run again if a key changes that it does not read: one of `without`, or none of `only`."""
    return json.dumps(model and model.model_dump(mode="json", include=only, exclude=set(without)), sort_keys=True)


def benchmark_settings(*without):
    """A parameter function: the benchmark without these keys, and without counts of rows, which are only checked."""
    return lambda wildcards: canonical(PROJECT.benchmarks[wildcards.benchmark].measured, without)


def own_code_of(key):
    """A parameter function: digests of the attacks or metrics of one's own that a benchmark names."""
    return lambda wildcards: own_code(PROJECT.benchmarks[wildcards.benchmark], key)


def run_checkpoint(wildcards):
    """The model of a run: the original, the retrained, or the one that the run has trained or corrected."""
    baseline = PROJECT.methods[wildcards.method].baseline
    if baseline == "original":
        return MODEL.format(model=wildcards.model)
    if baseline == "retrained":
        return MODEL.format(model=PROJECT.models[wildcards.model].retrained)
    return f"{RUN}/checkpoint.json".format(**wildcards)


def results_of(key):
    """The files of a run that its rows in the tables come from."""
    method = PROJECT.methods[key.method]
    names = ["run.yaml", "evaluation.json", "questions.csv", "attack.json", "attack_questions.csv"]
    names += ["checkpoint.json"] * bool(method.rule) + ["history.json"] * (method.rule == "unlearn")
    bases = [f"{BASES}.json".format(**key._asdict())] if method.has_bases else []
    return [f"{RESULTS}/{key.folder}/{name}" for name in names] + bases


def data_files(*letters, news=(), corpora=()):
    """An input function: the files of a benchmark by its kind, and its corpora."""

    def files(wildcards):
        names = [*(news if wildcards.benchmark in NEWS else letters), *(f"{name}_corpus" for name in corpora)]
        return [f"{DATA}/{name}.jsonl".format(benchmark=wildcards.benchmark) for name in names]

    return files


def code_of_model(wildcards):
    """The code that prepares a model. To train another embedded model repeats no published one."""
    published = PROJECT.models[wildcards.model].source == "published"
    return code_fingerprint(f"gripmoe.cli.prepare_model:{'download' if published else 'prepare_model'}")


def folder_of(wildcards, input):
    return str(Path(input.data[0]).parent)


def retrained_of(wildcards):
    """The description of the retrained model; only news is compared with it."""
    if wildcards.benchmark not in NEWS:
        return []
    return [MODEL.format(model=PROJECT.models[wildcards.model].retrained)]


def retrained_flag(wildcards, input):
    return f"--retrained {input.retrained}" if input.retrained else ""


def local_files(source, pattern="*"):
    """The files of a folder that are not hidden; none of a hub id. Path leaves out a slash at the end, with which Snakemake
    finds no file."""
    shown = (file for file in Path(source).glob(pattern) if file.is_file())
    return sorted(str(file) for file in shown if not re.search(r"(^|/)\.", str(file.relative_to(source))))


def growing(amount):
    """A resource that grows with every attempt, for jobs that ran out of memory or time."""
    return lambda wildcards, attempt: amount * attempt


def processes_of(wildcards):
    """How many processes train a model together."""
    return PROJECT.processes(wildcards.model, getattr(wildcards, "method", None))


# MB of each process of a job. `--set-resources RULE:mem_mb=...` asks for other amounts.
MEMORY = 163840 if ON_GPU else 3000
THREADS = 8 if ON_GPU else 1  # of jobs with a model: they read files and feed a GPU


def memory_for(processes=lambda _: 1):
    """Host memory of a job of so many processes, which grows with every attempt."""
    return lambda wildcards, attempt: attempt * MEMORY * processes(wildcards)


def gpu_resources(processes=lambda _: 1):
    """All GPUs of a job are on one node: a process sees those of its node only."""
    gpus = (lambda wildcards: PROJECT.gpus(wildcards.model)) if ON_GPU else 0
    return {"mem_mb": memory_for(processes), "gpu": gpus, "nodes": 1}


# With GRIPMOE_GPUS a command refuses to compute on the CPU of a node whose GPUs it does not see; worlds of embedded models
# alone may use the CPU. Snakemake repeats a rule whose text has changed, so a world that names a published model too repeats
# the embedded runs that it shares with other worlds.
GRIPMOE = "GRIPMOE_GPUS={resources.gpu} gripmoe" if PUBLISHED else "gripmoe"
ENVIRONMENT = f"{workflow.basedir}/envs/environment.yaml"
