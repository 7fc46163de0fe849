# Tidy tables of all runs, one notebook per table and figure, and a page of all runs, attacks and questions.

import os

from gripmoe.reporting import RENDERING, TABLES
from gripmoe.reporting.specifications import description, notebook_of

# Notebooks look for the others beside "runs": the checks of training, the answers to every item, the attacks on every item.
COLLECTED = {name: f"{RESULTS}/{name}_{PROJECT.name}.csv" for name in TABLES}
# Relative, as all inputs: Snakemake recognizes a file by its path, and a checkout may lie elsewhere.
NOTEBOOKS = Path(os.path.relpath(Path(workflow.basedir).resolve() / "notebooks"))
try:
    NOTEBOOK = {name: str(notebook_of(name, NOTEBOOKS)) for name in WORLD.artefacts}
    ABOUT = {name: description(name, NOTEBOOKS)[1] for name in WORLD.artefacts}
except ConfigError as error:
    raise WorkflowError(str(error))
FIGURES = f"paper_figures/{PROJECT.name}"
ARTEFACTS = [f"{FIGURES}/{name}.{suffix}" for name in WORLD.artefacts for suffix in PROJECT.artefacts[name].formats]
EXPLORER = f"{FIGURES}/explorer.html"
MANIFEST = f"{FIGURES}/manifest.json"

# The runs that are shown: all of the world; with `--config partial=1`, those that have ended.
SHOWN = PROJECT.run_keys()
if config.get("partial"):
    SHOWN = [key for key in SHOWN if Path(RESULTS, key.folder, "attack.json").exists()]
    if not SHOWN and workflow.is_main_process:
        raise WorkflowError(f"--config partial: no run of {PROJECT.name} has ended; leave it out")
SHOWN_BENCHMARKS = list(dict.fromkeys(key.benchmark for key in SHOWN))
STEPS = {"evaluate", "attack"} | {PROJECT.methods[key.method].rule for key in SHOWN} - {None}


rule collect:
    input:
        [file for key in SHOWN for file in results_of(key)],
    output:
        **COLLECTED,
    log:
        f"{LOGS}/collect_{PROJECT.name}.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=growing(8000),
        runtime=growing(30),
    params:
        folders=sorted(f"{RESULTS}/{key.folder}" for key in SHOWN),
        code=code_fingerprint("gripmoe.cli.collect:collect"),
    shell:
        "gripmoe collect {params.folders} --output {output.runs} --histories {output.histories}"
        " --answers {output.answers} --attacks {output.attacks} > {log} 2>&1"


for artefact in WORLD.artefacts:

    rule:
        name:
            f"render_{artefact}"
        input:
            **COLLECTED,
            notebook=NOTEBOOK[artefact],
        output:
            files=[
                (
                    report(
                        f"{FIGURES}/{artefact}.{suffix}",
                        caption="../report/artefact.rst",
                        category="Tables" if "tex" in PROJECT.artefacts[artefact].formats else "Figures",
                        labels={"artefact": artefact.replace("_", " "), "world": PROJECT.name},
                    )
                    if suffix in ("html", "png")
                    else f"{FIGURES}/{artefact}.{suffix}"
                )
                for suffix in PROJECT.artefacts[artefact].formats
            ],
            notebook=f"{RESULTS}/notebooks_{PROJECT.name}/{artefact}.ipynb",
        log:
            f"{LOGS}/render_{PROJECT.name}/{artefact}.log",
        conda:
            ENVIRONMENT
        resources:
            mem_mb=growing(2000),
            runtime=growing(30),
        params:
            code=code_fingerprint(*RENDERING),
            about=ABOUT[artefact],  # its caption in the report
        shell:
            "papermill {input.notebook} {output.notebook} -p runs {input.runs} -p output {output.files[0]} > {log} 2>&1"


rule explore:
    input:
        **COLLECTED,
        data=[
            f"{DATA}/{name}.jsonl".format(benchmark=benchmark)
            for benchmark in SHOWN_BENCHMARKS
            for name in (("knowmem", "verbmem") if benchmark in NEWS else ("forget_questions", "retain_questions"))
        ],
    output:
        EXPLORER,
    log:
        f"{LOGS}/explore_{PROJECT.name}.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=growing(8000),
        runtime=growing(30),
    params:
        folders=[DATA.format(benchmark=benchmark) for benchmark in SHOWN_BENCHMARKS],
        code=code_fingerprint("gripmoe.cli.explore:explore", "gripmoe.reporting.explorer", *RENDERING),
    shell:
        "gripmoe explore {params.folders} --runs {input.runs} --output {output} > {log} 2>&1"


rule manifest:
    input:
        **COLLECTED,
        artefacts=ARTEFACTS,
        explorer=EXPLORER,
        notebooks=sorted(set(NOTEBOOK.values())),
    output:
        report(MANIFEST, caption="../report/manifest.rst", category="Provenance"),
    log:
        f"{LOGS}/manifest_{PROJECT.name}.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=growing(2000),
        runtime=growing(10),
    params:
        code=code_fingerprint("gripmoe.cli.manifest:manifest", *[f"gripmoe.cli.{step}:{step}" for step in STEPS]),
    shell:
        "gripmoe manifest {input.artefacts} {input.explorer} {input.notebooks} {input.histories} {input.answers} {input.attacks} --runs {input.runs} --output {output}"
        " > {log} 2>&1"
