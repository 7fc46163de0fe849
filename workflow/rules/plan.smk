# What a world has left to do, as a target: `snakemake plan`.


localrules:
    plan,


rule plan:
    """What is left to do, what it costs, whether it fits: `snakemake plan`."""
    log:
        f"{LOGS}/plan_{PROJECT.name}.log",
    conda:
        ENVIRONMENT
    params:
        world=PROJECT.world_file,
        config=PROJECT.folder,
    shell:
        "gripmoe plan --world {params.world:q} --config {params.config:q} 2>&1 | tee {log}"
