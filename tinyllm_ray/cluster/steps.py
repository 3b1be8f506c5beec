"""The job steps of a cluster: one `srun` a node, what each says, and its end.

Standard library only.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tinyllm_ray.cluster.jobs import is_away
from tinyllm_ray.cluster.node import Node
from tinyllm_ray.command import note

_ASKED_FOR_BY_THE_JOB = (
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_TRES_PER_TASK"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_NNODES"),
    *("SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE", "SLURM_EXPORT_ENV", "SLURM_STEP_GRES"),
)
"""What srun would read as its own options; a step is told everything by its command line."""

Said = tuple[str, dict[str, Any] | None]
"""A node and its message; None is the step's end."""


class Steps:
    """The running steps; `ready` and `ended` hold what is known of each node."""

    def __init__(self, logs: Path, secret: str, program: Sequence[str]) -> None:
        """`program` runs `tinyllm_ray.cluster.node`, the node's description being added; `logs` gets a file a node."""
        self.ready: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, str] = {}
        """Why, on one line, for the nodes that are not there, or no longer."""
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._told: dict[str, Node] = {}
        self._said: queue.Queue[Said] = queue.Queue()
        self._log_begins: dict[str, int] = {}
        """Bytes that an earlier run of the job left in a node's log."""
        self._logs, self._secret, self._program = logs, secret, program

    @property
    def processes(self) -> list[int]:
        return [process.pid for process in self._running.values()]

    def start(self, node: Node) -> None:
        """Start a node's step; returns at once."""
        with open_log(self._logs / f"{node.name}.log") as log:
            self._log_begins[node.name] = log.tell()
            process = subprocess.Popen(
                [*step_command(node), *self._program, str(node)],
                env=step_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # only this process tells it to end
            )
        self._running[node.name], self._told[node.name] = process, node
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._secret.encode() + b"\n")
            process.stdin.flush()
        threading.Thread(target=self._listen, args=(node.name, process), daemon=True).start()

    def start_unanswered(self, nodes: Iterable[str]) -> None:
        """Start those steps again that ended as nobody at Slurm answered srun, which gives up after 9 s (22.05)."""
        for node in nodes:
            if node in self._told and is_away(self.ended.get(node, "")):
                note(f"cluster: {node}: {self.ended.pop(node)}; again", sys.stderr)
                self.start(self._told[node])

    def hear(self, seconds: float) -> None:
        """Take in what the steps say, waiting at most `seconds` for the first word."""
        with contextlib.suppress(queue.Empty):
            self._note(*self._said.get(timeout=seconds))
            while True:
                self._note(*self._said.get_nowait())

    def end(self, nodes: Iterable[str], seconds: float) -> None:
        """End steps: their input's end tells them; `srun` itself is ended after `seconds`."""
        processes = [self._running[node] for node in nodes if node in self._running]
        for process in processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        end = time.monotonic() + seconds
        for ending, patience in ((None, 0.0), (subprocess.Popen.terminate, 2.0), (subprocess.Popen.kill, 2.0)):
            left = [process for process in processes if process.poll() is None]
            for process in left:
                if ending is not None:
                    ending(process)
            until = max(end, time.monotonic() + patience)
            for process in left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))

    def _listen(self, node: str, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                self._said.put((node, json.loads(line)))
            except ValueError:
                note(f"{node}: {line.decode(errors='replace').rstrip()}", sys.stderr)
        process.wait()
        self._said.put((node, None))

    def _note(self, node: str, message: Mapping[str, Any] | None) -> None:
        if message is None:
            status = self._running[node].returncode
            words = complaint(self._logs / f"{node}.log", self._log_begins.get(node, 0))
            self.ended.setdefault(node, f"its step ended with {status}{': ' if words else ''}{words}")
            self.ready.pop(node, None)
        elif message["event"] == "ready":
            self.ready[node] = dict(message)
        else:
            self.ended[node] = str(message["reason"])


def open_log(path: Path) -> BinaryIO:
    """A file to append to; where there can be none, nowhere: what a step says is lost, and the step is not."""
    try:
        return path.open("ab")
    except OSError as error:
        note(f"cluster: {path}: {error.strerror}; what the node says is lost", sys.stderr)
        return Path(os.devnull).open("ab")


def describe(steps: Steps, nodes: Sequence[str]) -> str:
    """Nodes and why each is missing, on one line."""
    return ", ".join(f"{node} ({steps.ended.get(node, 'no answer before the deadline')})" for node in nodes)


def complaint(log: Path, begin: int = 0) -> str:
    """The first thing that srun complained of in a node's log from byte `begin` on; empty where it did not."""
    with contextlib.suppress(OSError):
        for line in log.read_bytes()[begin:].decode(errors="replace").splitlines():
            if line.startswith("srun: error: "):
                return line.removeprefix("srun: error: ")
    return ""


def step_environment() -> dict[str, str]:
    """This process's variables without those that srun would read as options."""
    return {name: value for name, value in os.environ.items() if name not in _ASKED_FOR_BY_THE_JOB}


def step_command(node: Node) -> list[str]:
    """`srun` for one node's step, with all that the job has there.

    `--overlap`, as the batch step has it too, and so that a user can look in with a step of their own.
    """
    return [
        *("srun", "--nodes=1", "--ntasks=1", f"--nodelist={node.name}", "--overlap", "--kill-on-bad-exit=0"),
        f"--cpus-per-task={node.cpus}",
        *([f"--mem={node.memory_mib}M"] if node.memory_mib else []),
        f"--gres=gpu:{node.gpus}" if node.gpus else "--gres=none",
        *("--mpi=none", "--unbuffered"),
    ]
