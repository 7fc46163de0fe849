"""The remaining jobs of a world and their cost, measured on fake tensors. Only `fake` imports torch."""

from gripmoe.planning.cost import TFLOPS, Cost, Costs, Step, steps_of, what_would_fit
from gripmoe.planning.jobs import Job, check_budget, disk_needed, jobs_left, jobs_of, that_count

__all__ = [
    "TFLOPS",
    "Cost",
    "Costs",
    "Job",
    "Step",
    "check_budget",
    "disk_needed",
    "jobs_left",
    "jobs_of",
    "steps_of",
    "that_count",
    "what_would_fit",
]
