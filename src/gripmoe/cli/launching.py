"""How several processes are started that train one model together: by torchrun, on one node or on each of several."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from gripmoe.io.errors import ConfigError

FIRST_PORT, PORTS = 20_000, 10_000  # of rendezvous of SLURM jobs, by job id

BY_TORCHRUN = "TORCHELASTIC_RUN_ID"  # only torchrun sets this variable; batch scripts export WORLD_SIZE too


def start_together(processes: int, nodes: int, rendezvous: str | None) -> None:
    """Replaces this process by the same command in so many, unless it is one of them or there is one alone. Raises
    ConfigError as `started_together` does."""
    if processes > 1 and BY_TORCHRUN not in os.environ:
        command = started_together(processes, nodes, rendezvous, sys.argv[1:], os.environ)
        os.execvp(command[0], command)


def started_together(
    processes: int, nodes: int, rendezvous: str | None, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """The command that runs `gripmoe <arguments>` in so many processes. On several nodes of a SLURM job, the first of
    which this is, it starts the same command on each; elsewhere the user does, with one `rendezvous` (host:port of one
    of them). Raises ConfigError where there is neither, or if the nodes cannot have equally many processes."""
    gripmoe = [sys.executable, "-m", "gripmoe.cli.main", *arguments]
    if nodes > 1 and not rendezvous:
        job = environment.get("SLURM_JOB_ID")
        if not job:
            raise ConfigError(
                f"--nodes {nodes} outside of a SLURM job: start the same command on each node with --rendezvous "
                "HOST:PORT of one of them"
            )
        each = [f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={processes // nodes}"]
        srun = ["srun", f"--jobid={job}", f"--nodes={nodes}", *each, "--kill-on-bad-exit=1"]
        return [*srun, *gripmoe, "--rendezvous", f"{socket.gethostname()}:{FIRST_PORT + int(job) % PORTS}"]
    return [*torchrun(processes, nodes, rendezvous, arguments), "-m", "--", "gripmoe.cli.main", *arguments]


def torchrun(processes: int, nodes: int, rendezvous: str | None, arguments: Sequence[str]) -> list[str]:
    """torchrun's own part of the command; nodes that are given the same arguments find one another."""
    if processes % nodes:
        raise ConfigError(f"{processes} processes cannot be spread evenly over {nodes} nodes")
    run = [sys.executable, "-m", "torch.distributed.run"]
    if nodes == 1:
        return [*run, "--standalone", f"--nproc-per-node={processes}"]
    identity = hashlib.sha256("\n".join(arguments).encode()).hexdigest()[:16]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", f"--rdzv-id={identity}"]
    return [*run, f"--nnodes={nodes}", f"--nproc-per-node={processes // nodes}", *meeting]
