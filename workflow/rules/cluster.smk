# A killed Snakemake leaves its jobs in the queue, and a new one would submit the same runs beside them. So it looks before
# it starts. (Each step also locks its run.)

import os
import shutil
import subprocess

from gripmoe.planning.jobs import check_budget, jobs_of


def orphans():
    """Jobs that a Snakemake of this folder has left in the queue, one line each."""
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
        check_budget(jobs_of(PROJECT, Path(RESULTS), steps), float(config["budget"]))
    except ValueError as error:
        raise WorkflowError(f"--config budget: {error}")


onstart:
    if "budget" in config:
        refuse_above_budget()
    if left := orphans():
        raise WorkflowError(
            "jobs of another Snakemake of this folder are still in the queue:\n  "
            + "\n  ".join(left)
            + "\nIf it still runs, they are its own: leave them. Otherwise wait until they have ended, or scancel them; then "
            "start again, and they resume from their checkpoints."
        )
