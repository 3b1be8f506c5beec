"""A job whose first node went down, and the launcher with it: ended from one of the others.

Under `--no-kill`, which has a job outlive its other nodes, Slurm keeps it running then, with nothing in it (seen with
22.05). Standard library only: a node's step imports this module.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping

from tinyllm_ray.cluster.jobs import ask_slurm, own_name
from tinyllm_ray.cluster.nodes import expand_nodes, job_field
from tinyllm_ray.errors import ConfigError

_KNOCK_SECONDS = 5.0


def end_headless(
    number: int,
    head: str,
    let_go: Callable[[], bool],
    ask: Callable[..., str] = ask_slurm,
    environment: Mapping[str, str] = os.environ,
) -> bool:
    """Once Slurm has taken the first node out of the job, cancel it, or have it run again where it may.

    Returns at once where the cluster's `head` (HOST:PORT) answers, and as soon as the launcher has `let_go`, which
    waits a few seconds each time; whether it was this that ended the job.
    """
    name = own_name({"SLURM_JOB_ID": str(number), **environment})  # of an array's last task the number is all of them
    while not let_go() and not _answers(head):
        with contextlib.suppress(ConfigError):  # a slurmctld that restarts
            job = ask("scontrol", "show", "job", "--oneliner", name)
            if is_headless(job):
                may_return = job_field(job, "Requeue") == "1"
                ask(*(("scontrol", "requeue") if may_return else ("scancel",)), name)
                return True
    return False


def is_headless(job: str) -> bool:
    """Whether the node of the job's script is no longer among its nodes, from `scontrol show job`."""
    script, nodes = job_field(job, "BatchHost"), job_field(job, "NodeList")
    return bool(script and nodes) and script not in expand_nodes(nodes or "")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS):
        return True
    return False
