# All metrics of a cell in one process.


rule evaluate:
    input:
        run=f"{CELL}/run.yaml",
        model=MODEL,
        checkpoint=cell_checkpoint,
        data=multiext(
            f"{DATA}/",
            "forget_questions.jsonl",
            "retain_questions.jsonl",
            "forget_corpus.jsonl",
            "held_out_corpus.jsonl",
        ),
    output:
        metrics=f"{CELL}/evaluation.json",
        questions=f"{CELL}/questions.csv",
    log:
        f"{LOGS}/evaluate/{CELL_NAME}.log",
    benchmark:
        f"{BENCHMARKS}/evaluate/{CELL_NAME}.tsv"
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        **GPU_RESOURCES,
        runtime=growing(240),
    params:
        data=lambda wildcards, input: str(Path(input.data[0]).parent),
        code=code_fingerprint("gripmoe.evaluation.choice", "gripmoe.evaluation.report", "gripmoe.evaluation.routing"),
    shell:
        "gripmoe evaluate --run {input.run} --model {input.model} --checkpoint {input.checkpoint} --data {params.data}"
        " --questions {output.questions} --output {output.metrics} > {log} 2>&1"
