# The validated configuration, the layout of results/, and what several rules share. Nothing heavy is imported: every cluster
# job parses these files again.

import gc
import json
import os
import re
from argparse import Namespace
from base64 import urlsafe_b64encode
from pathlib import Path

from snakemake.exceptions import WorkflowError

from gripmoe.io.errors import ConfigError
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.catalogues import own_code
from gripmoe.config.grid import Project
from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.io.files import read_yaml
from gripmoe.reporting import RENDERING

# The graph of a large world is millions of objects that stay: garbage collection among them took an eighth of the time.
gc.set_threshold(500_000, 20, 100)

CONFIG = Path(workflow.basedir) / "workflow" / "config"

unknown_keys = sorted(set(config) - {"world", "budget", "partial"})
if unknown_keys:
    raise WorkflowError(f"--config: unknown key {unknown_keys[0]!r}; valid keys: world, budget, partial")
if str(config.get("partial", 0)) not in ("0", "1", "False", "True"):
    raise WorkflowError(f"--config partial={config['partial']}: give 1, or leave it out")
try:
    PROJECT = Project(CONFIG, str(config.get("world", "tiny")))
except ConfigError as error:
    raise WorkflowError(str(error))

WORLD = PROJECT.world
RESULTS = f"results/{PROJECT.results_name}"  # a world that extends another shares its runs
RUNS = f"{RESULTS}/runs_{PROJECT.name}.csv"
# Notebooks look for these beside RUNS: the checks of training, the answers to every item, the attacks on every item.
HISTORIES = f"{RESULTS}/histories_{PROJECT.name}.csv"
ANSWERS = f"{RESULTS}/answers_{PROJECT.name}.csv"
ATTACKS = f"{RESULTS}/attacks_{PROJECT.name}.csv"
# Relative, as all inputs: Snakemake recognizes a file by its path, and a checkout may lie elsewhere.
NOTEBOOKS = os.path.relpath(Path(workflow.basedir).resolve() / "notebooks")
FIGURES = f"paper_figures/{PROJECT.name}"
EXPLORER = f"{FIGURES}/explorer.html"
MANIFEST = f"{FIGURES}/manifest.json"
LOGS = f"{RESULTS}/logs"
DATA = f"{RESULTS}/data/{{benchmark}}"
MODEL = f"{RESULTS}/models/{{model}}/model.json"
ROUTING = f"{RESULTS}/{{model}}/{{benchmark}}/routing"
ORIGINALS = f"{RESULTS}/{{model}}/{{benchmark}}/original_answers"
BASES = f"{RESULTS}/{{model}}/{{benchmark}}/bases/{{method}}"
RUN = f"{RESULTS}/{{model}}/{{benchmark}}/{{objective}}/{{method}}/{{seed}}"
RUN_NAME = "{model}.{benchmark}.{objective}.{method}.{seed}"

WITH_BASES = [name for name in WORLD.all_methods if PROJECT.methods[name].has_bases]
RETRAINED = [PROJECT.models[name].retrained for name in WORLD.models if PROJECT.models[name].retrained]
NEWS = [name for name in WORLD.benchmarks if PROJECT.benchmarks[name].is_news]
LETTERS = [name for name in WORLD.benchmarks if name not in NEWS]
REWRITES = {
    name: list(PROJECT.benchmarks[name].rewrites.values()) for name in LETTERS if PROJECT.benchmarks[name].rewrites
}
FINETUNED = [name for name in WORLD.models + RETRAINED if PROJECT.models[name].source == "finetuned"]
PREPARED = [name for name in PROJECT.models_needed if name not in FINETUNED]
PUBLISHED = any(PROJECT.models[name].source == "published" for name in PREPARED)
ON_GPU = PUBLISHED or any(map(PROJECT.trains_on_gpu, PREPARED))


def any_of(names):
    """A wildcard constraint that matches these names and, without any, nothing."""
    return "|".join(map(str, names)) or "(?!)"


wildcard_constraints:
    model=any_of(PREPARED + FINETUNED),
    benchmark=any_of(WORLD.benchmarks),
    objective=any_of([NO_OBJECTIVE, *WORLD.objectives]),
    method=any_of(WORLD.all_methods),
    seed=any_of(sorted({0, *WORLD.seeds})),


def methods_of(rule):
    """A wildcard constraint that matches the methods whose checkpoints a rule makes."""
    return any_of(name for name in WORLD.all_methods if PROJECT.methods[name].rule == rule)


def canonical(model, without=()):
    """A configuration object as one string, the same for every key order: a parameter that Snakemake tracks. A step does
    not run again if a key changes that it does not read (`without`)."""
    return json.dumps(model and model.model_dump(mode="json", exclude=set(without)), sort_keys=True)


def run_settings(wildcards):
    w = wildcards
    return canonical(PROJECT.run(w.model, w.benchmark, w.objective, w.method, int(w.seed)))


def checkpoint_every(wildcards):
    """A resource, since it changes no result: a run goes on when it changes."""
    w = wildcards
    return PROJECT.training(w.objective, w.method, w.benchmark).checkpoint_every


def benchmark_settings(*without):
    """A parameter function: the benchmark without these keys, and without counts of rows, which are only checked."""
    return lambda wildcards: canonical(PROJECT.benchmarks[wildcards.benchmark].measured, without)


def own_code_of(key):
    """A parameter function: digests of the attacks or metrics of one's own that a benchmark names."""
    return lambda wildcards: own_code(PROJECT.benchmarks[wildcards.benchmark], key)


def run_folders():
    """The folder of every run of the world; with `--config partial=1`, of every run that has ended."""
    folders = ["/".join(map(str, (RESULTS, *key))) for key in PROJECT.run_keys()]
    if not config.get("partial"):
        return folders
    ended = [folder for folder in folders if Path(folder, "attack.json").exists()]
    if not ended and workflow.is_main_process:
        raise WorkflowError(f"--config partial: no run of {PROJECT.name} has ended; leave it out")
    return ended


def shown_benchmarks():
    """The benchmarks of `run_folders`."""
    return list(dict.fromkeys(Path(folder).parts[3] for folder in run_folders()))


def require_known_settings():
    """Snakemake keeps in .snakemake which settings a run was made with. Without that record, as in a folder that was
    copied, a run of other settings would count as made."""
    if not workflow.is_main_process:
        return
    for key in PROJECT.run_keys():
        made = Path(RESULTS, *map(str, key), "run.yaml")
        if not made.exists() or has_record(made):
            continue
        if read_yaml(made) != PROJECT.run(*key).model_dump(mode="json"):
            raise WorkflowError(
                f"{made}: this run has other settings than {PROJECT.world_file}, and .snakemake has no record of them. "
                "Delete the file to compute the run again, or take back the settings"
            )


def has_record(output):
    """Whether Snakemake has a record of a file that it has made. It splits names above 254 characters."""
    name = urlsafe_b64encode(str(output).encode()).decode()
    return len(name) > 254 or Path(".snakemake/metadata", name).exists()


def run_files(*names):
    """The named files of every run."""
    return [f"{folder}/{name}" for folder in run_folders() for name in names]


def run_checkpoint(wildcards):
    """The model of a run: the original, the retrained, or the one that the run has trained or corrected."""
    baseline = PROJECT.methods[wildcards.method].baseline
    if baseline == "original":
        return MODEL.format(model=wildcards.model)
    if baseline == "retrained":
        return MODEL.format(model=PROJECT.models[wildcards.model].retrained)
    return f"{RUN}/checkpoint.json".format(**wildcards)


def data_files(*letters, news=(), corpora=()):
    """An input function: the files of a benchmark by its kind, and its corpora."""

    def files(wildcards):
        names = [*(news if wildcards.benchmark in NEWS else letters), *(f"{name}_corpus" for name in corpora)]
        return [f"{DATA}/{name}.jsonl".format(benchmark=wildcards.benchmark) for name in names]

    return files


def finetuning_data(wildcards):
    return data_files(news=("knowmem", "verbmem", "privleak"), corpora=("forget", "retain", "held_out"))(
        Namespace(benchmark=PROJECT.models[wildcards.model].benchmark)
    )


def folder_of(wildcards, input):
    return str(Path(input.data[0]).parent)


def rewrites_of(wildcards):
    """The files of rewritten prompts that a benchmark names."""
    return REWRITES.get(wildcards.benchmark, [])


def retrained_of(wildcards):
    """The description of the retrained model; only news is compared with it."""
    if wildcards.benchmark not in NEWS:
        return []
    return [MODEL.format(model=PROJECT.models[wildcards.model].retrained)]


def retrained_flag(wildcards, input):
    return f"--retrained {input.retrained}" if input.retrained else ""


def bases_of(wildcards):
    return [f"{BASES}.json".format(**wildcards)] if wildcards.method in WITH_BASES else []


def bases_flag(wildcards):
    return f"--bases {BASES}.safetensors".format(**wildcards) if wildcards.method in WITH_BASES else ""


def corrected_checkpoint(wildcards):
    corrected = PROJECT.methods[wildcards.method].corrects
    return f"{RUN}/checkpoint.json".format(**{**wildcards, "method": corrected})


def external_source(wildcards):
    """Folder or hub id of an external checkpoint."""
    return PROJECT.external[wildcards.method][wildcards.model]


def local_files(source, pattern="*"):
    """The files of a folder that are not hidden; none of a hub id. Path leaves out a slash at the end, with which Snakemake
    finds no file."""
    shown = (file for file in Path(source).glob(pattern) if file.is_file())
    return sorted(str(file) for file in shown if not re.search(r"(^|/)\.", str(file.relative_to(source))))


def external_files(wildcards):
    return local_files(external_source(wildcards))


def published_data(wildcards):
    """The files of a benchmark's data sets, where these are folders."""
    data = PROJECT.benchmarks[wildcards.benchmark].data
    return sorted({file for source in data.sources for file in local_files(source, "**/*")})


def published_files(wildcards):
    """The files of a published model in a folder."""
    model = PROJECT.models[wildcards.model]
    return local_files(model.id) if model.source == "published" else []


for name, folders in PROJECT.external.items():
    for source in folders.values():
        if not Path(source).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@\S+)?", source):
            raise WorkflowError(
                f"{PROJECT.world_file}: external.{name}: no folder {source}; correct it, or give a hub id"
            )


def artefact_files():
    catalogue = PROJECT.artefacts
    return [f"{FIGURES}/{name}.{suffix}" for name in WORLD.artefacts for suffix in catalogue[name].formats]


def introduction(notebook):
    """The text below a notebook's heading: the caption of its artefact in the report."""
    try:
        first = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"][0]["source"]
    except FileNotFoundError:
        raise WorkflowError(
            f"artefacts: {Path(notebook).stem!r} has no {notebook}, which renders it: copy that of a table or figure "
            "like it, and change what it draws"
        )
    return "".join(first).partition("\n")[2].strip()


def growing(amount):
    """A resource that grows with every attempt, for jobs that ran out of memory or time."""
    return lambda wildcards, attempt: amount * attempt


def gpus_of(wildcards):
    return PROJECT.gpus(wildcards.model)


def processes_of(wildcards):
    return PROJECT.processes(wildcards.model, getattr(wildcards, "method", None))


# MB of each process of a job. `--set-resources RULE:mem_mb=...` asks for other amounts.
MEMORY = 163840 if ON_GPU else 3000
FIT_THREADS = 16 if ON_GPU else 1  # of fit_basis, whose decompositions take hours for a published model


THREADS = 8 if ON_GPU else 1  # of other jobs with a model: they read files and feed a GPU


def memory_for(processes):
    """Host memory of a job of so many processes, which grows with every attempt."""
    return lambda wildcards, attempt: attempt * MEMORY * (processes(wildcards) if callable(processes) else processes)


def gpu_resources(processes=1):
    """All GPUs of a job are on one node: a process sees those of its node only."""
    gpus = gpus_of if WORLD.gpus else 1
    return {"mem_mb": memory_for(processes), "gpu": gpus if ON_GPU else 0, "nodes": 1}


# With this number, a command refuses to compute on the CPU of a node whose GPUs it does not see. Embedded models may.
GRIPMOE = "GRIPMOE_GPUS={resources.gpu} gripmoe" if PUBLISHED else "gripmoe"
PROCESSES = processes_of if WORLD.gpus else 1  # that train a model together
ENVIRONMENT = f"{workflow.basedir}/envs/environment.yaml"
