# From data to the paper's tables and figures:
#   prepare -> trace routing -> fit bases -> unlearn -> (realign) -> evaluate -> attack -> collect -> render
# One world is run, chosen by `--config world=NAME` (tiny by default; the slurm profile sets paper).

from snakemake.utils import min_version

min_version("9.0")


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/geometry.smk"
include: "workflow/rules/unlearn.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/attack.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/cluster.smk"
include: "workflow/rules/plan.smk"


require_known_settings()


rule all:
    default_target: True
    input:
        ARTEFACTS,
        EXPLORER,
        MANIFEST,
