"""A Slurm of several nodes on this machine, and what its tests ask of it."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cluster" / "local_slurm.sh"
PATIENCE_SECONDS = 900.0
"""For all that a test waits for; five times what the longest one takes on two idle cores."""
_ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
_TAIL_LINES = 60
_STARTER = "-m tinyllm_ray.train.starter"
_ITS_OWN = re.compile(r"local_slurm\.sh boot|^slurmd |^ps ")


@dataclass(frozen=True)
class LocalSlurm:
    folder: Path
    environment: tuple[str, ...]
    ends: float = field(default_factory=lambda: time.monotonic() + PATIENCE_SECONDS)
    """When a test that still waits has failed, on time.monotonic."""

    def for_one_test(self) -> "LocalSlurm":
        """The same one, with all patience."""
        return replace(self, ends=time.monotonic() + PATIENCE_SECONDS)

    @property
    def work(self) -> Path:
        """A folder that every node sees."""
        return self.folder / "work"

    def login(self, *command: object) -> str:
        """Standard output of a command on the login node."""
        done = self.try_login(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def try_login(self, *command: object) -> "subprocess.CompletedProcess[str]":
        words = [str(SCRIPT), "login", str(self.folder), "env", *self.environment, *map(str, command)]
        return subprocess.run(
            words, cwd=self.work, text=True, capture_output=True, timeout=PATIENCE_SECONDS, check=False
        )

    def submit(self, *arguments: object, by: Sequence[str] = ()) -> int:
        """The number of a job that `submit` has submitted, under a command that becomes another user where one is."""
        said = self.login(*by, sys.executable, "-m", "tinyllm_ray.cluster", "submit", *arguments)
        match = re.match(r"job (\d+), log (.*)\n", said)
        assert match, said
        assert match[2] == str(self.log(int(match[1])))
        return int(match[1])

    def log(self, job: int) -> Path:
        return self.work / f"tinyllm-{job}.log"

    def field(self, job: int, name: str) -> str:
        (value,) = re.findall(rf"\b{name}=(\S+)", self.login("scontrol", "show", "job", "--oneliner", job))
        return str(value)

    def is_active(self, job: int) -> bool:
        """Whether a job waits, runs, or is ending: a job has ended when its batch script has."""
        return self.field(job, "JobState") in _ACTIVE

    def ended(self, job: int) -> str:
        """Waits for a job's end; its state. Its steps' last processes go within Slurm's KillWait."""
        self.wait(lambda: not self.is_active(job))
        return self.field(job, "JobState")

    def said(self, job: int) -> str:
        """A job's log so far."""
        return self.log(job).read_text() if self.log(job).exists() else ""

    def wait_for_line(self, job: int, text: str) -> None:
        """Waits until a job's log has `text`."""
        self.wait(lambda: text in self.said(job), job)

    def processes(self, node: str) -> list[str]:
        """Command lines of all processes on a node but Slurm's daemon."""
        return [line for line in self.on(node, "ps", "-ww", "-eo", "args=").splitlines() if not _ITS_OWN.search(line)]

    def processes_of(self, job: int, node: str) -> list[str]:
        """Those on a node that name a job's own folder there, as all of its Ray's do."""
        return [line for line in self.processes(node) if re.search(rf"/tr\d+-{job}/", line)]

    def end_process(self, node: str, command: str) -> None:
        """SIGKILL the one process on a node whose command line begins like `command`."""
        listed = self.on(node, "ps", "-ww", "-eo", "pid=,args=").splitlines()
        found = [line.split(None, 1)[0] for line in listed if re.match(command, line.split(None, 1)[1])]
        assert len(found) == 1, listed
        self.signal(node, "KILL", int(found[0]))

    def candidate_process(self, node: str) -> tuple[int, int] | None:
        """The process that measures a candidate on a node, and the one through which it reports; None while none is."""
        rows = [line.split(None, 2) for line in self.on(node, "ps", "-ww", "-eo", "pid=,ppid=,args=").splitlines()]
        starters = {int(number): int(parent) for number, parent, words in rows if _STARTER in words}
        found = [(number, starters[parent]) for number, parent in starters.items() if parent in starters]
        return found[0] if found else None

    def signal(self, node: str, name: str, process: int) -> None:
        """Send a process on a node a signal, by its name."""
        self.on(node, "kill", f"-{name}", str(process))

    def on(self, node: str, *command: str) -> str:
        """Standard output of a command on a node."""
        words = [str(SCRIPT), "on", str(self.folder), node, *command]
        return subprocess.run(words, text=True, capture_output=True, check=True).stdout

    def files(self, node: str) -> list[str]:
        """Names in a node's own /tmp."""
        return sorted(path.name for path in (self.folder / "node" / node / "tmp").iterdir())

    def controller(self, what: str) -> None:
        """Have slurmctld go `away`, or come `back`."""
        subprocess.run([SCRIPT, what, self.folder], check=True)

    def kill(self, node: str) -> None:
        subprocess.run([SCRIPT, "kill", self.folder, node], check=True)

    def is_empty(self, *nodes: str) -> bool:
        """Whether nothing runs on the nodes but Slurm's daemons."""
        return not any(self.processes(node) for node in nodes)

    def wait(self, condition: Callable[[], bool], job: int | None = None) -> None:
        """Until it holds. Slurm tells nobody; so it is asked.

        Fails with the ends of all logs where `job` ends without it, and when the test's time is over.
        """
        while not condition():
            if job is not None and not self.is_active(job):
                assert condition(), f"job {job} has ended: {self.field(job, 'JobState')}\n{self._tails()}"
                return
            assert time.monotonic() < self.ends, f"not within {PATIENCE_SECONDS:.0f} s\n{self._tails()}"
            time.sleep(0.5)

    def _tails(self) -> str:
        """The ends of all jobs' logs, their steps' included."""
        logs = sorted([*self.work.glob("tinyllm-*.log"), *self.work.glob("tinyllm-*/*.log")])
        return "\n".join(
            "\n".join([f"{path.relative_to(self.work)}:", *path.read_text().splitlines()[-_TAIL_LINES:]])
            for path in logs
        )


@contextmanager
def booted(
    nodes: int, cpus: int, gpus: int, cache: Path, tmp_mb: int | None = None, accounting: str = ""
) -> Iterator[LocalSlurm]:
    """While entered, a Slurm with nodes n1, n2, ...; it and all of its processes are gone afterwards.

    A node's /tmp holds `tmp_mb`; as much as this machine's disk where nothing is said. With `accounting` "full" sacct
    has a data base.
    """
    # Not in a test's own folder: a socket's path is short, and nodes have a /tmp of their own.
    folder = Path(tempfile.mkdtemp(prefix="tinyllm-slurm-", dir="/var/tmp"))
    shared = [str(path) for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix), cache)]
    try:
        environment = {**os.environ, "TMP_MB": str(tmp_mb or ""), "ACCOUNTING": accounting}
        command = [SCRIPT, "start", folder, *map(str, (nodes, cpus, gpus)), *shared]
        subprocess.run(command, env=environment, check=True)
        slurm = LocalSlurm(folder, (f"TINYLLM_RAY_CACHE={cache}", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"))
        slurm.work.mkdir()
        yield slurm
    finally:
        subprocess.run([SCRIPT, "stop", folder], check=True)
