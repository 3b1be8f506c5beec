"""The launcher's part in staging: packs once, a job step that unpacks on all nodes, what was compiled kept at the end.

Nothing here ends a job: without its copies it reads the shared ones, and a line says so. Standard library only.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyllm_ray.cluster.node_folder import job_folder
from tinyllm_ray.cluster.nodes import Share
from tinyllm_ray.cluster.stage_place import COMPILED, stage_folder, staged_python, staged_variables
from tinyllm_ray.cluster.steps import step_environment
from tinyllm_ray.command import note

PACK_SECONDS = 900.0
"""For packs to be made, which happens once: some GB in ten thousands of files, from a shared file system."""
COLLECT_SECONDS = 60.0
_TICK_SECONDS = 0.2


@dataclass
class Staging:
    """One job's staging; where it is not wanted, everything is as without."""

    wanted: bool
    python: Sequence[str]
    """Command line of the shared Python, in a container where there is one."""
    packs: str | None
    in_container: bool
    job: int
    scratch: str
    received: Sequence[int]
    """Signals, which end whatever it does."""
    staged: bool = field(default=False, init=False)
    """Whether some node has copies."""

    @property
    def folder(self) -> Path:
        """Where this node's copies are, or would be."""
        return stage_folder(job_folder(self.scratch, os.getuid(), self.job), os.getuid(), self.job)

    def stage(self, command: Sequence[str], shares: Sequence[Share], seconds: float) -> bool:
        """Put copies on every node within `seconds` after the packs are there; whether any node has some."""
        if not self.wanted:
            return False
        without = ["--without-environment"] if self.in_container else []
        made = self._run(["pack", *self._packs(), *without, "--", *command], PACK_SECONDS)
        if not made or not made[0]["packs"]:
            note("stage: there is nothing to unpack; all is read where it lies", sys.stderr)
            return False
        for line in made[0]["notes"]:
            note(f"stage: {line}")
        note(f"stage: packs of {', '.join(made[0]['packs'])} are there after {made[0]['seconds']:.1f} s")
        told = json.dumps({"packs": made[0]["packs"], "job": self.job, "scratch": self.scratch})
        began = time.monotonic()
        answers = self._run(["unpack", told], seconds, unpack_step(shares))
        self.staged = any(answer["whole"] for answer in answers)
        self._report(answers, [share.node for share in shares], time.monotonic() - began)
        return self.staged

    @property
    def driver_python(self) -> list[str]:
        """The Python for the job's command, on this node."""
        return [staged_python(self.folder)] if self.staged and not self.in_container else list(self.python)

    def variables(self) -> dict[str, str]:
        """Environment variables for the job's command, on this node."""
        return staged_variables(self.folder) if self.staged else {}

    def collect(self) -> None:
        """Keep what was compiled on this node for the next job, unless a signal leaves no time for it."""
        compiled = self.folder / COMPILED
        if self.staged and not self.received and compiled.is_dir():
            self._run(["collect", *self._packs(), str(compiled)], COLLECT_SECONDS)

    def _packs(self) -> list[str]:
        return [f"--packs={self.packs}"] if self.packs else []

    def _report(self, answers: Sequence[Mapping[str, Any]], nodes: Sequence[str], seconds: float) -> None:
        for answer in answers:
            for name, problem in answer["problems"].items():
                note(f"stage: {answer['node']} reads the shared {name}: {problem}", sys.stderr)
        if missing := sorted(set(nodes) - {answer["node"] for answer in answers}):
            note(f"stage: {', '.join(missing)} did not answer and read what is shared", sys.stderr)
        if answers:
            gib = max(answer["bytes"] for answer in answers) / 2**30
            note(f"stage: {gib:.2f} GiB on {len(answers)} of {len(nodes)} nodes in {seconds:.1f} s")

    def _run(self, words: Sequence[str], seconds: float, step: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The JSON lines that the staging program prints; all else goes to the job's log."""
        command = [*step, *self.python, "-m", "tinyllm_ray.cluster.stage", *words]
        process = subprocess.Popen(
            command, env=step_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=_TICK_SECONDS)
                break
            if self.received or time.monotonic() > end:
                output = _end(process)
                note(f"stage: {words[0]} is given up after {seconds:.0f} s", sys.stderr)
                break
        return [answer for line in output.splitlines() if (answer := _answer(line))]


def unpack_step(shares: Sequence[Share]) -> list[str]:
    """`srun` for one task on each of the job's nodes, with what the job has on the smallest of them."""
    nodes = ",".join(share.node for share in shares)
    memory = min(share.memory_mib for share in shares)
    return [
        *("srun", f"--nodes={len(shares)}", f"--ntasks={len(shares)}", "--ntasks-per-node=1", f"--nodelist={nodes}"),
        *("--overlap", "--gres=none", "--kill-on-bad-exit=0", "--mpi=none"),  # buffered, so that lines stay whole
        f"--cpus-per-task={min(share.cpus for share in shares)}",
        *([f"--mem={memory}M"] if memory else []),
    ]


def _end(process: "subprocess.Popen[str]") -> str:
    """End a process that takes too long; what it has said."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=5.0)[0]
    process.kill()
    return process.communicate()[0]


def _answer(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
