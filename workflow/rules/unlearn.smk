# Training of a run, correction of the routers of a finished run (Method B), or a copy of a model unlearned elsewhere.

import re

ORIGINAL_ANSWERS = f"{RESULTS}/{{model}}/{{benchmark}}/original_answers"

# Else a mistyped folder would count as a hub id when its job runs.
for name, folders in PROJECT.external.items():
    for source in folders.values():
        is_hub_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@\S+)?", source) and not Path(source).parent.is_dir()
        if not Path(source).is_dir() and not is_hub_id:
            raise WorkflowError(
                f"{PROJECT.world_file}: external.{name}: no folder {source}; correct it, or give a hub id"
            )


rule unlearn:
    input:
        run=f"{RUN}/run.yaml",
        model=MODEL,
        retrained=retrained_of,
        data=data_files(
            "forget_questions", "retain_questions", news=("knowmem", "verbmem"), corpora=("forget", "retain")
        ),
        routing=f"{ROUTING}.json",
        trace=ancient(f"{ROUTING}.safetensors"),
        forget_trace=ancient(f"{ROUTING}_forget.safetensors"),
        bases=lambda w: [f"{BASES}.json".format(**w)] if PROJECT.methods[w.method].has_bases else [],
    output:
        checkpoint=f"{RUN}/checkpoint.json",
        history=f"{RUN}/history.json",
    log:
        f"{LOGS}/unlearn/{RUN_NAME}.log",
    wildcard_constraints:
        method=methods_of("unlearn"),
        objective=any_of(WORLD.objectives),
    priority: 10
    conda:
        ENVIRONMENT
    threads: THREADS if ON_GPU else processes_of
    resources:
        **gpu_resources(processes_of),
        processes=processes_of,
        runtime=growing(720),
        # A resource, since it changes no result: a run goes on when it changes.
        checkpoint_every=lambda w: PROJECT.training(w.model, w.benchmark, w.objective, w.method).checkpoint_every,
        original_gb=WORLD.original_memory,
        basis_gb=WORLD.basis_memory,
        basis_host_gb=WORLD.basis_host_memory,
    params:
        data=folder_of,
        original_answers=ORIGINAL_ANSWERS,
        bases=lambda w: f"--bases {BASES}.safetensors".format(**w) if PROJECT.methods[w.method].has_bases else "",
        retrained=retrained_flag,
        code=code_fingerprint("gripmoe.cli.unlearn:unlearn"),
    shell:
        f"{GRIPMOE} unlearn"
        " --run {input.run} --model {input.model} --data {params.data} --trace {input.trace} --forget-trace {input.forget_trace}"
        " --processes {resources.processes} --checkpoint-every {resources.checkpoint_every}"
        " --original-answers {params.original_answers} --original-memory {resources.original_gb}"
        " --basis-memory {resources.basis_gb} --basis-host-memory {resources.basis_host_gb}"
        " {params.bases} {params.retrained} --output {output.checkpoint} > {log} 2>&1"


rule realign:
    input:
        run=f"{RUN}/run.yaml",
        model=MODEL,
        checkpoint=lambda w: f"{RUN}/checkpoint.json".format(**{**w, "method": PROJECT.methods[w.method].corrects}),
        retain_corpus=f"{DATA}/retain_corpus.jsonl",
        routing=f"{ROUTING}.json",
        trace=ancient(f"{ROUTING}.safetensors"),
    output:
        f"{RUN}/checkpoint.json",
    log:
        f"{LOGS}/realign/{RUN_NAME}.log",
    wildcard_constraints:
        method=methods_of("realign"),
        objective=any_of(WORLD.objectives),
    conda:
        ENVIRONMENT
    threads: THREADS
    resources:
        **gpu_resources(),
        runtime=growing(120),
    params:
        code=code_fingerprint("gripmoe.cli.realign:realign"),
    shell:
        f"{GRIPMOE} realign"
        " --run {input.run} --model {input.model} --checkpoint {input.checkpoint}"
        " --retain-corpus {input.retain_corpus} --trace {input.trace} --output {output} > {log} 2>&1"


rule edit_weights:
    input:
        run=f"{RUN}/run.yaml",
        model=MODEL,
        data=data_files(corpora=("forget", "retain")),
    output:
        f"{RUN}/checkpoint.json",
    log:
        f"{LOGS}/edit_weights/{RUN_NAME}.log",
    wildcard_constraints:
        method=methods_of("edit_weights"),
        objective=NO_OBJECTIVE,
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory_for(),
        runtime=growing(60),
    params:
        data=folder_of,
        code=code_fingerprint("gripmoe.cli.edit_weights:edit_weights"),
    shell:
        "gripmoe edit-weights --run {input.run} --model {input.model} --data {params.data} --output {output} > {log} 2>&1"


rule import_checkpoint:
    input:
        run=f"{RUN}/run.yaml",  # not read, but awaited: the command locks the folder, which removes half-written files
        model=MODEL,
        files=lambda w: local_files(PROJECT.external[w.method][w.model]),  # none of a hub id
    output:
        f"{RUN}/checkpoint.json",
    log:
        f"{LOGS}/import_checkpoint/{RUN_NAME}.log",
    wildcard_constraints:
        method=any_of(PROJECT.external),
        objective=NO_OBJECTIVE,
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory_for(),
        runtime=growing(60),
    params:
        external=lambda w: PROJECT.external[w.method][w.model],  # folder or hub id
        code=code_fingerprint("gripmoe.cli.import_checkpoint:import_checkpoint"),
    shell:
        "gripmoe import-checkpoint --model {input.model} --external {params.external:q} --output {output} > {log} 2>&1"
