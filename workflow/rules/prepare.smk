# Data, models, and the resolved configuration of each run.

LETTERS = [name for name in WORLD.benchmarks if name not in NEWS]
FINETUNED = [name for name in PROJECT.models_needed if PROJECT.models[name].source == "finetuned"]
PREPARED = [name for name in PROJECT.models_needed if name not in FINETUNED]


rule prepare_data:
    input:
        # the files of data sets that are folders
        lambda w: sorted(
            {file for data in PROJECT.benchmarks[w.benchmark].data.sources for file in local_files(data, "**/*")}
        ),
    output:
        multiext(
            f"{DATA}/",
            "forget_questions.jsonl",
            "retain_questions.jsonl",
            "truthfulqa.jsonl",
            "forget_corpus.jsonl",
            "retain_corpus.jsonl",
            "held_out_corpus.jsonl",
            "membership.jsonl",
        ),
    log:
        f"{LOGS}/prepare_data/{{benchmark}}.log",
    wildcard_constraints:
        benchmark=any_of(LETTERS),
    conda:
        ENVIRONMENT
    resources:
        mem_mb=growing(3000),
        runtime=growing(60),
    params:
        folder=lambda wildcards, output: str(Path(output[0]).parent),
        settings=lambda w: canonical(PROJECT.benchmarks[w.benchmark].data),
        code=code_fingerprint("gripmoe.cli.prepare_data:prepare_data"),
    shell:
        "gripmoe prepare-data --settings {params.settings:q} --output {params.folder} > {log} 2>&1"


use rule prepare_data as prepare_news with:
    output:
        multiext(
            f"{DATA}/",
            "forget_corpus.jsonl",
            "retain_corpus.jsonl",
            "held_out_corpus.jsonl",
            "knowmem.jsonl",
            "verbmem.jsonl",
            "privleak.jsonl",
        ),
    log:
        f"{LOGS}/prepare_news/{{benchmark}}.log",
    wildcard_constraints:
        benchmark=any_of(NEWS),


rule prepare_model:
    input:
        base=lambda w: [MODEL.format(model=base) for base in [PROJECT.models[w.model].made_from] if base],
        files=lambda w: local_files(PROJECT.models[w.model].id) if PROJECT.models[w.model].source == "published" else [],
    output:
        MODEL,
    log:
        f"{LOGS}/prepare_model/{{model}}.log",
    wildcard_constraints:
        model=any_of(PREPARED),
    priority: 100
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory_for(),
        gpu=lambda w: int(PROJECT.trains_on_gpu(w.model)),
        runtime=growing(240),
    params:
        settings=lambda w: canonical(PROJECT.models[w.model], without=["config"]),  # which plans read
        base=lambda wildcards, input: f"--base {input.base}" if input.base else "",
        code=code_of_model,
    shell:
        "gripmoe prepare-model --settings {params.settings:q} --gpus {resources.gpu} {params.base}"
        " --output {output} > {log} 2>&1"


rule finetune_model:
    input:
        base=lambda w: MODEL.format(model=PROJECT.models[w.model].base),
        data=lambda w: [
            f"{DATA}/{name}.jsonl".format(benchmark=PROJECT.models[w.model].benchmark)
            for name in ("knowmem", "verbmem", "privleak", "forget_corpus", "retain_corpus", "held_out_corpus")
        ],
    output:
        MODEL,
    log:
        f"{LOGS}/finetune_model/{{model}}.log",
    wildcard_constraints:
        model=any_of(FINETUNED),
    priority: 100
    conda:
        ENVIRONMENT
    threads: THREADS if ON_GPU else processes_of
    resources:
        **gpu_resources(processes_of),
        processes=processes_of,
        runtime=growing(720),
    params:
        data=folder_of,
        settings=lambda w: canonical(PROJECT.models[w.model]),
        documents=lambda w: canonical(PROJECT.benchmarks[PROJECT.models[w.model].benchmark].documents),
        code=code_fingerprint("gripmoe.cli.finetune_model:finetune_model"),
    shell:
        f"{GRIPMOE} finetune-model"
        " --settings {params.settings:q} --benchmark {params.documents:q} --model {input.base}"
        " --processes {resources.processes}"
        " --data {params.data} --output {output} > {log} 2>&1"


localrules:
    configure,


rule configure:
    output:
        f"{RUN}/run.yaml",
    log:
        f"{LOGS}/configure/{RUN_NAME}.log",
    conda:
        ENVIRONMENT
    params:
        settings=lambda w: canonical(PROJECT.run(w.model, w.benchmark, w.objective, w.method, int(w.seed))),
    shell:
        "gripmoe configure --settings {params.settings:q} --output {output} > {log} 2>&1"
