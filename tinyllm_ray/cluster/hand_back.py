"""Gives nodes of a job back to Slurm when its command has no use for them any more.

The command appends the nodes' addresses to a file that the launcher names to it. Standard library only: the launcher
imports this module.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from tinyllm_ray.cluster.jobs import ask_slurm
from tinyllm_ray.cluster.steps import Steps
from tinyllm_ray.command import note
from tinyllm_ray.errors import ConfigError

HAND_BACK_VARIABLE = "TINYLLM_RAY_HAND_BACK"
"""Names the file; what stands in it, one address a line, is not used any more."""
_END_SECONDS = 10.0


class HandBack:
    """The launcher's side."""

    def __init__(
        self, path: Path, job: int, head: str, name: str | None = None, ask: Callable[..., str] = ask_slurm
    ) -> None:
        """`name` is the job's own (`jobs.own_name`), None its number.

        `path` is emptied: what an earlier run of the job gave back is this one's again.
        """
        self.path = path
        self._job, self._head, self._ask = job, head, ask
        self._name = name or str(job)
        self._read = 0
        with contextlib.suppress(OSError):
            path.write_bytes(b"")

    def look(self, steps: Steps) -> list[str]:
        """End the steps of nodes named since the last look, and give the nodes back; which they are."""
        try:
            if self.path.stat().st_size == self._read:
                return []
            text = self.path.read_bytes()
        except OSError:
            return []
        self._read = len(text)
        addresses = set(text.decode(errors="replace").split())
        nodes = [node for node, said in steps.ready.items() if said["node_address"] in addresses and node != self._head]
        if nodes:
            kept = [node for node in steps.ready if node not in nodes]
            steps.end(nodes, _END_SECONDS)
            self._shrink(kept)
            note(f"cluster: handed back {', '.join(nodes)}, which the study has no more use for")
        return nodes

    def _shrink(self, kept: list[str]) -> None:
        try:
            self._ask("scontrol", "update", f"JobId={self._name}", f"NodeList={','.join(kept)}")
        except ConfigError as error:
            note(f"cluster: Slurm keeps the nodes in the job: {error}", sys.stderr)
        with contextlib.suppress(OSError):  # a folder that is away
            for script in Path().glob(f"slurm_job_{self._job}_resize.*sh"):  # scontrol leaves them for a user's shell
                script.unlink()
