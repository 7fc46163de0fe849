# What Snakemake looks at before it starts.

import os
import shutil
import subprocess
from base64 import urlsafe_b64encode

from gripmoe.io.files import read_yaml
from gripmoe.planning.jobs import check_budget, jobs_of


def require_known_settings():
    """Snakemake keeps in .snakemake which settings a run was made with. Without that record, as in a folder that was
    copied, a run of other settings would count as made."""
    if not workflow.is_main_process:
        return
    for key in PROJECT.run_keys():
        made = Path(RESULTS, key.folder, "run.yaml")
        if not made.exists() or has_record(made):
            continue
        if read_yaml(made) != PROJECT.run(*key).model_dump(mode="json"):
            raise WorkflowError(
                f"{made}: this run has other settings than {PROJECT.world_file}, and .snakemake has no record of them. "
                "Delete the file to compute the run again, or take back the settings"
            )


def has_record(output):
    """Whether Snakemake has a record of a file that it has made. It splits names above 254 characters."""
    name = urlsafe_b64encode(str(output).encode()).decode()
    return len(name) > 254 or Path(".snakemake/metadata", name).exists()


def orphans():
    """Jobs that a killed Snakemake of this folder has left in the queue, one line each. Another Snakemake would submit
    the same runs beside them. (Each step also locks its run.)"""
    if not shutil.which("squeue"):
        return []
    queue = subprocess.run(
        ["squeue", "--me", "--noheader", "--format=%i|%T|%Z|%k"], capture_output=True, text=True, check=False
    )
    jobs = [line.split("|", 3) for line in queue.stdout.splitlines() if line.count("|") >= 3]
    own = os.environ.get("SLURM_JOB_ID")
    return [
        f"{job} ({state}): {comment}"
        for job, state, folder, comment in jobs
        if folder == os.getcwd() and comment.startswith("rule_") and job != own
    ]


def refuse_above_budget():
    """`--config budget=HOURS`: no job is submitted if the jobs of this call take more."""
    steps = [(job.rule.name, tuple(job.wildcards)) for job in workflow.dag.needrun_jobs()]
    try:
        check_budget(jobs_of(PROJECT, PROJECT.results, steps), BUDGET)
    except ValueError as error:
        raise WorkflowError(f"--config budget: {error}")


onstart:
    if BUDGET is not None:
        refuse_above_budget()
    if left := orphans():
        raise WorkflowError(
            "jobs of another Snakemake of this folder are still in the queue:\n  "
            + "\n  ".join(left)
            + "\nIf it still runs, they are its own: leave them. Otherwise wait until they have ended, or scancel them; then "
            "start again, and they resume from their checkpoints."
        )
