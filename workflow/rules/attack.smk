# All attacks on a run in one process.


rule attack:
    input:
        run=f"{RUN}/run.yaml",
        model=MODEL,
        checkpoint=run_checkpoint,
        evaluation=ancient(f"{RUN}/evaluation.json"),  # for the order alone: both steps lock the run's folder
        rewrites=lambda w: list(PROJECT.benchmarks[w.benchmark].rewrites.values()),
        data=data_files(
            "forget_questions",
            "retain_questions",
            "membership",
            news=("knowmem", "verbmem"),
            corpora=("forget", "retain", "held_out"),
        ),
    output:
        metrics=f"{RUN}/attack.json",
        questions=f"{RUN}/attack_questions.csv",
    log:
        f"{LOGS}/attack/{RUN_NAME}.log",
    conda:
        ENVIRONMENT
    threads: THREADS
    resources:
        **gpu_resources(),
        runtime=growing(240),
    params:
        data=folder_of,
        benchmark=benchmark_settings("evaluation_batch_size", "few_shot_questions", "metrics"),
        own=own_code_of("attacks"),
        relearning=canonical(PROJECT.world.relearning),
        code=code_fingerprint("gripmoe.cli.attack:attack"),
    shell:
        f"{GRIPMOE} attack"
        " --settings {params.relearning:q} --run {input.run} --benchmark {params.benchmark:q}"
        " --model {input.model} --checkpoint {input.checkpoint} --data {params.data}"
        " --questions {output.questions} --output {output.metrics} > {log} 2>&1"
