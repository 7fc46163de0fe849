# Routing traces, and the retain bases of Method A. Later rules depend on the small digests (.json) of these large files.

FIT_THREADS = 16 if ON_GPU else 1  # decompositions take hours for a published model


rule trace_routing:
    input:
        model=MODEL,
        retain=f"{DATA}/retain_corpus.jsonl",
        forget=f"{DATA}/forget_corpus.jsonl",
    output:
        digest=f"{ROUTING}.json",
        trace=f"{ROUTING}.safetensors",
        forget_trace=f"{ROUTING}_forget.safetensors",
    log:
        f"{LOGS}/trace_routing/{{model}}.{{benchmark}}.log",
    conda:
        ENVIRONMENT
    threads: THREADS
    resources:
        **gpu_resources(),
        runtime=growing(60),
    params:
        settings=lambda w: canonical(PROJECT.benchmarks[w.benchmark].documents),
        code=code_fingerprint("gripmoe.cli.trace_routing:trace_routing"),
    shell:
        f"{GRIPMOE} trace-routing"
        " --settings {params.settings:q} --model {input.model}"
        " --retain-corpus {input.retain} --forget-corpus {input.forget} --digest {output.digest} --output {output.trace}"
        " --forget-output {output.forget_trace} > {log} 2>&1"


rule fit_basis:
    input:
        model=MODEL,
        digest=f"{ROUTING}.json",
        trace=ancient(f"{ROUTING}.safetensors"),
        forget_trace=ancient(f"{ROUTING}_forget.safetensors"),
    output:
        digest=f"{BASES}.json",
        bases=f"{BASES}.safetensors",
    log:
        f"{LOGS}/fit_basis/{{model}}.{{benchmark}}.{{method}}.log",
    conda:
        ENVIRONMENT
    threads: FIT_THREADS
    resources:
        mem_mb=memory_for(),
        runtime=growing(360 if ON_GPU else 60),
    params:
        settings=lambda w: canonical(PROJECT.methods[w.method], only=Method.OF_BASES),
        code=code_fingerprint("gripmoe.cli.fit_basis:fit_basis"),
    shell:
        "gripmoe fit-basis --settings {params.settings:q} --model {input.model} --trace {input.trace}"
        " --forget-trace {input.forget_trace} --digest {output.digest} --output {output.bases} > {log} 2>&1"
