# Data, models, and the resolved configuration of each run.


rule prepare_data:
    input:
        published_data,
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
        files=published_files,
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
        mem_mb=memory_for(1),
        gpu=lambda w: int(PROJECT.trains_on_gpu(w.model)),
        runtime=growing(240),
    params:
        settings=lambda w: canonical(PROJECT.models[w.model], without=["config"]),  # which plans read
        base=lambda wildcards, input: f"--base {input.base}" if input.base else "",
        code=code_fingerprint("gripmoe.cli.prepare_model:prepare_model"),
    shell:
        "gripmoe prepare-model --settings {params.settings:q} --gpus {resources.gpu} {params.base}"
        " --output {output} > {log} 2>&1"


rule finetune_model:
    input:
        base=lambda w: MODEL.format(model=PROJECT.models[w.model].base),
        data=finetuning_data,
    output:
        MODEL,
    log:
        f"{LOGS}/finetune_model/{{model}}.log",
    wildcard_constraints:
        model=any_of(FINETUNED),
    priority: 100
    conda:
        ENVIRONMENT
    threads: THREADS if ON_GPU else PROCESSES
    resources:
        **gpu_resources(PROCESSES),
        processes=PROCESSES,
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
        settings=run_settings,
    shell:
        "gripmoe configure --settings {params.settings:q} --output {output} > {log} 2>&1"
