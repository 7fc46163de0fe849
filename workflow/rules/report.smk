# Tidy tables of all runs, one notebook per table and figure, and a page of all runs, attacks and questions.


rule collect:
    input:
        run_files("run.yaml", "evaluation.json", "questions.csv", "attack.json", "attack_questions.csv"),
    output:
        runs=RUNS,
        histories=HISTORIES,
        answers=ANSWERS,
        attacks=ATTACKS,
    log:
        f"{LOGS}/collect_{PROJECT.name}.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=growing(8000),
        runtime=growing(30),
    params:
        folders=sorted(run_folders()),
        code=code_fingerprint("gripmoe.cli.collect:collect"),
    shell:
        "gripmoe collect {params.folders} --output {output.runs} --histories {output.histories}"
        " --answers {output.answers} --attacks {output.attacks} > {log} 2>&1"


for artefact in WORLD.artefacts:

    rule:
        name:
            f"render_{artefact}"
        input:
            notebook=f"{NOTEBOOKS}/{artefact}.ipynb",
            runs=RUNS,
            histories=HISTORIES,
            answers=ANSWERS,
            attacks=ATTACKS,
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
            about=introduction(f"{NOTEBOOKS}/{artefact}.ipynb"),
        shell:
            "papermill {input.notebook} {output.notebook} -p runs {input.runs} -p output {output.files[0]} > {log} 2>&1"


rule explore:
    input:
        runs=RUNS,
        tables=[HISTORIES, ANSWERS, ATTACKS],
        data=[
            f"{DATA}/{name}.jsonl".format(benchmark=benchmark)
            for benchmark in shown_benchmarks()
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
        folders=[DATA.format(benchmark=benchmark) for benchmark in shown_benchmarks()],
        code=code_fingerprint("gripmoe.cli.explore:explore", "gripmoe.reporting.explorer", *RENDERING),
    shell:
        "gripmoe explore {params.folders} --runs {input.runs} --output {output} > {log} 2>&1"


rule manifest:
    input:
        artefacts=artefact_files(),
        explorer=EXPLORER,
        notebooks=[f"{NOTEBOOKS}/{artefact}.ipynb" for artefact in WORLD.artefacts],
        runs=RUNS,
        tables=[HISTORIES, ANSWERS, ATTACKS],
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
        code=code_fingerprint("gripmoe.cli.manifest:manifest"),
    shell:
        "gripmoe manifest {input.artefacts} {input.explorer} {input.notebooks} {input.tables} --runs {input.runs} --output {output}"
        " > {log} 2>&1"
