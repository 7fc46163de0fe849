# All metrics of a run in one process.


rule evaluate:
    input:
        run=f"{RUN}/run.yaml",
        model=MODEL,
        checkpoint=run_checkpoint,
        retrained=retrained_of,
        data=data_files(
            "forget_questions",
            "retain_questions",
            "truthfulqa",
            news=("knowmem", "verbmem", "privleak"),
            corpora=("forget", "held_out"),
        ),
    output:
        metrics=f"{RUN}/evaluation.json",
        questions=f"{RUN}/questions.csv",
    log:
        f"{LOGS}/evaluate/{RUN_NAME}.log",
    conda:
        ENVIRONMENT
    threads: THREADS
    resources:
        **gpu_resources(),
        runtime=growing(240),
    params:
        data=folder_of,
        benchmark=benchmark_settings("attacks", "rewrites"),
        own=own_code_of("metrics"),
        retrained=retrained_flag,
        code=code_fingerprint("gripmoe.cli.evaluate:evaluate"),
    shell:
        f"{GRIPMOE} evaluate"
        " --run {input.run} --benchmark {params.benchmark:q} --model {input.model} --checkpoint {input.checkpoint} --data {params.data}"
        " {params.retrained} --questions {output.questions} --output {output.metrics} > {log} 2>&1"
