"""One node of a job's Ray cluster: a job step that starts Ray with what Slurm gave, and ends with its launcher.

    python -m tinyllm_ray.cluster.node '{"job": 17, "head": null, "cpus": 16, ...}'

The step reads the cluster's secret from its standard input and then waits for that input's end, which comes when the
launcher is done and also when it is gone. It says one JSON line: that the node is ready, and where it listens, or why
not. Every process of Ray descends from this one, and none outlives it.

Standard library only, Ray being started as a program: nothing slow stands between a job step and its answer.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinyllm_ray.cluster.addresses import (
    PORTS_A_JOB,
    address_towards,
    free_ports,
    is_free,
    own_address,
    require_answer,
)
from tinyllm_ray.cluster.descendants import adopt_orphans, descendants, end_descendants, reap
from tinyllm_ray.cluster.headless import end_headless
from tinyllm_ray.cluster.limits import make_room
from tinyllm_ray.cluster.node_folder import LIMIT_SECONDS, PATIENCE_SECONDS, NodeFolder
from tinyllm_ray.cluster.numa_memory import bind_host_memory
from tinyllm_ray.cluster.stage_place import staged_python, staged_variables
from tinyllm_ray.errors import EXIT_BUG, EXIT_DONE, EXIT_SIGTERM, TinyllmRayError

OBJECT_STORE_MIB = 128
"""Batches never travel through the object store; Ray's own default takes 30% of the memory."""
HELD_BACK_SECONDS = 25.0
"""How long a SIGTERM of Slurm waits for the launcher, whose study saves meanwhile; `KillWait` is 30 s by default."""
_TICK_SECONDS = 0.2
_LOOK_SECONDS = 3.0
_MOST_STARTS = 3
_TOO_SLOW = "timed out during startup"
"""Ray 2.60 gives its processes 30 s to be there, which a cold shared file system may take for their imports; a second
start finds them in the page cache. The launcher has the deadline."""
_RAY = ("-c", "from ray.scripts.scripts import main; main()")


@dataclass(frozen=True)
class Node:
    """What a node's step is told."""

    job: int
    name: str
    """The node as Slurm calls it."""
    head: str | None
    """HOST:PORT of the cluster to join; None where this node is its head."""
    cpus: int
    gpus: int
    memory_mib: int
    """0 where Slurm does not hand out memory."""
    known_as: str | None = None
    """The address that Slurm has for the node; None for its name."""
    scratch: str = "/tmp"
    interface: str | None = None
    """The network interface to listen at; None for the address that Slurm has for the node."""
    staged: bool = False
    """Whether the job has put copies of its files on its nodes (`stage_place`); this one may lack them."""

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def main(arguments: list[str]) -> int:
    """Run the step and return its exit status."""
    node = Node(**json.loads(arguments[0]))
    told: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
    for number in (signal.SIGINT, signal.SIGUSR1):
        # Ray's processes inherit this. Not SIGHUP, by which the kernel ends what was stopped and lost its parent.
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    try:
        make_room()
        with NodeFolder(node.scratch, node.job, node.staged) as folder:
            token = folder.write_token(sys.stdin.buffer.readline())
            memory = bind_host_memory()  # Ray's processes inherit it
            ready, core = _start(node, folder, token)
            _say(event="ready", node=node.name, memory=memory, **ready)
            return _stay(node, core, told)
    except TinyllmRayError as error:
        _say(event="failed", node=node.name, reason=str(error))
        return error.exit_status
    except OSError as error:  # a full disk
        where = error.filename or node.scratch
        _say(event="failed", node=node.name, reason=f"{where}: {error.strerror}; give the site another scratch folder")
        return EXIT_BUG


def _start(node: Node, own: NodeFolder, token: Path) -> tuple[dict[str, Any], set[int]]:
    """Start Ray; what the launcher has to know of it, and the processes without which there is no node.

    Raises TinyllmRayError with Ray's last line where it fails.
    """
    staged = staged_variables(own.stage) if node.staged else {}
    python = staged_python(own.stage) if node.staged else sys.executable
    environment = ray_environment({**os.environ, **staged}, token)
    for _ in range(_MOST_STARTS):
        address = own_address(node.known_as or node.name, node.interface)
        if node.head is not None and node.interface is None:
            address = address_towards(node.head.rpartition(":")[0]) or address
        if node.head is not None:
            require_answer(node.head, address)
        ports = free_ports(node.job) if node.head is None else ()
        done = _run_ray([python, *_RAY, "start", *ray_arguments(node, address, ports, own.path)], environment)
        core = _core(node)
        if done.returncode == 0 and core:
            return {
                "host": os.uname().nodename,
                "address": node.head or f"{address}:{ports[0]}",
                "node_address": address,
                "dashboard_port": ports[1] if ports else None,
                "ports": list(ports),
                "token": str(token),
                "cpus": node.cpus,
                "gpus": node.gpus,
            }, core
        print(done.stdout, file=sys.stderr, flush=True)
        end_descendants(PATIENCE_SECONDS, LIMIT_SECONDS)
        if done.returncode and all(map(is_free, ports)) and _TOO_SLOW not in done.stdout:
            break  # no other program was in its way
    where = f"at {address}" + (f", ports {ports[0]} to {ports[-1]}" if ports else f", for the head at {node.head}")
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["without a word"]
    if not done.returncode:
        lines = ["its process for the node ends at once"]
    raise TinyllmRayError(f"Ray does not start on {node.name} {where}: {lines[-1].strip()}")


def _core(node: Node) -> set[int]:
    """Ray's processes whose end is the node's; none where one is missing, of which `ray start` says nothing."""
    wanted = {"raylet"} if node.head else {"raylet", "gcs_server"}
    # The oldest of a name: what the raylet forks bears its name until it has become a worker.
    found = {name: process for process, name in sorted(descendants().items(), reverse=True) if name in wanted}
    return set(found.values()) if found.keys() == wanted else set()


def _run_ray(command: list[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    # Through a file: Ray's processes keep the descriptor, so that a pipe would not end.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Slurm's signals are for this process, which passes them on when it is time
            check=False,
        )
        output.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, output.read())


def ray_environment(environment: Mapping[str, str], token: Path) -> dict[str, str]:
    """Variables for Ray's processes: nothing of another cluster, the secret by its file, nothing sent abroad."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("RAY_AUTH_", "RAY_ADDRESS"))}
    return kept | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Ray's own 15 starves a candidate beside whatever else runs, and a training does not run like that.
        "RAY_worker_niceness": "0",
        # Slurm watches over the job's memory. Ray would count the host's, other jobs and page cache included, and kill.
        "RAY_memory_monitor_refresh_ms": "0",
    }


def ray_arguments(node: Node, address: str, ports: tuple[int, ...], folder: Path) -> list[str]:
    """Arguments of `ray start` for a node at `address`; `ports` has PORTS_A_JOB entries on the head and none else."""
    mib = max((node.memory_mib or share_of_host(node.cpus)) - OBJECT_STORE_MIB, OBJECT_STORE_MIB)
    arguments = [
        f"--node-ip-address={address}",
        f"--num-cpus={node.cpus}",
        f"--num-gpus={node.gpus}",
        f"--memory={mib * 2**20}",
        f"--object-store-memory={OBJECT_STORE_MIB * 2**20}",
        # 0: what the system gives. Ray's own defaults are fixed numbers, the same for everyone on the host.
        *(f"--{name}=0" for name in ("node-manager-port", "object-manager-port", "min-worker-port", "max-worker-port")),
        *(f"--{name}=0" for name in ("dashboard-agent-listen-port", "metrics-export-port")),
        "--disable-usage-stats",
        "--log-color=false",
    ]
    if node.head is not None:
        return [f"--address={node.head}", *arguments]
    assert len(ports) == PORTS_A_JOB
    return [
        "--head",
        f"--port={ports[0]}",
        "--include-dashboard=true",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={ports[1]}",
        f"--ray-client-server-port={ports[2]}",
        f"--temp-dir={folder / 'r'}",  # one deeper: Ray opens its folder to everyone
        *arguments,
    ]


def share_of_host(cpus: int) -> int:
    """MiB of this host's memory that go with `cpus` of its processors, where Slurm hands out processors only."""
    mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    return mib * min(cpus, os.cpu_count() or 1) // (os.cpu_count() or 1)


def _stay(node: Node, core: set[int], told: list[float]) -> int:
    """Until the launcher lets go, a SIGTERM has waited long enough, or one of the `core` processes has ended."""
    while True:
        if _is_let_go(_TICK_SECONDS):
            return EXIT_DONE
        if told and time.monotonic() - told[0] > HELD_BACK_SECONDS:
            return EXIT_SIGTERM
        if core & set(reap()):
            print("tinyllm_ray: Ray's process for this node has ended", file=sys.stderr, flush=True)
            if node.head is not None:
                end_headless(node.job, node.head, lambda: bool(told) or _is_let_go(_LOOK_SECONDS))
            return EXIT_BUG


def _is_let_go(seconds: float) -> bool:
    """Whether the launcher lets go, or is gone, within that time."""
    return bool(select.select([0], [], [], seconds)[0]) and not os.read(0, 4096)


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
