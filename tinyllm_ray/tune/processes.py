"""Finds the processes of a study and ends them.

A process belongs to a study if the study's marker is in its environment, if it is in the session of the study's child,
or if its parent belongs to it. All three are needed: Ray's agents write their title over their environment (seen with
Ray 2.60), its actors lead process groups of their own, and a candidate may lead a session.

Linux; where there is no /proc, the child's process group is all that can be found. Standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tinyllm_ray.tune.terminal import show_cursor

STUDY_VARIABLE = "TINYLLM_RAY_STUDY"
"""Environment variable that every process of a study inherits; its value is the supervisor's run, used once."""

JOB_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What Slurm sends to every process of a job's step: at its end, and before it (`--signal=USR1@60`)."""

DROP_SECONDS = 0.2
"""For a killed helper to be gone."""

_PROC = Path("/proc")


@dataclass(frozen=True)
class _Process:
    pid: int
    started: int
    """In clock ticks since boot: tells a process from a later one with the same number."""
    name: str
    parent: int
    session: int
    ending: bool
    """Nothing runs any more: a zombie, unless other threads of it are still at work in the kernel."""

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"


def end_processes(marker: str, leader: int | None, *, patience_seconds: float, limit_seconds: float) -> list[str]:
    """Wait for a study's processes to end by themselves, then kill them; names those alive when the limit is over.

    `leader` is the study's child, which must not have been reaped: only then is its number surely not another's.
    """
    if not _PROC.joinpath("self", "stat").exists():
        return _end_group(leader, patience_seconds)
    begin = time.monotonic()
    known: set[tuple[int, int]] = set()
    while True:
        table = _process_table()
        # A process that gave up its memory has no environment to read, but may still hold a GPU: once known, it
        # counts until it is gone.
        known |= {(process.pid, process.started) for process in _members(table, marker, leader)}
        alive = [p for p in table.values() if (p.pid, p.started) in known and not p.ending]
        elapsed = time.monotonic() - begin
        if not alive or elapsed >= limit_seconds:
            return [str(process) for process in alive]
        if elapsed >= patience_seconds:
            for process in alive:
                # One that is not ours to end (set-user-ID) stays alive and is named.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)


def _members(table: dict[int, _Process], marker: str, leader: int | None) -> list[_Process]:
    entry = f"{STUDY_VARIABLE}={marker}".encode()
    found = {pid for pid, process in table.items() if process.session == leader or _carries(pid, entry)}
    while more := {pid for pid, process in table.items() if process.parent in found} - found:
        found |= more
    return [table[pid] for pid in found - {os.getpid()}]


def _process_table() -> dict[int, _Process]:
    table = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            # Ended since the listing, or another user's where /proc hides those.
            with contextlib.suppress(OSError):
                process = _parse_stat((_PROC / entry / "stat").read_bytes())
                table[process.pid] = process
    return table


def _parse_stat(stat: bytes) -> _Process:
    """proc_pid_stat(5); the name stands in parentheses and may hold spaces and parentheses itself."""
    pid, _, rest = stat.partition(b" (")
    name, _, after = rest.rpartition(b") ")
    fields = after.split()
    state, parent, session, threads, started = fields[0], fields[1], fields[3], fields[17], fields[19]
    return _Process(
        pid=int(pid),
        started=int(started),
        name=name.decode(errors="replace"),
        parent=int(parent),
        session=int(session),
        ending=state in (b"Z", b"X") and int(threads) <= 1,
    )


def _carries(pid: int, entry: bytes) -> bool:
    try:
        return entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # ended, or another user's
        return False


def _end_group(leader: int | None, patience_seconds: float) -> list[str]:
    if leader is not None:
        time.sleep(min(patience_seconds, 0.5))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    return []


def guard(marker: str) -> None:
    """A helper that ends the study when the supervisor dies before it has done so itself: its stdin ends then."""
    words = sys.stdin.buffer.read().split()
    alive = end_processes(marker, int(words[0]) if words else None, patience_seconds=0.0, limit_seconds=10.0)
    show_cursor()
    left = f", but for {', '.join(alive)}" if alive else ""
    print(f"tinyllm_ray: the study's supervisor was killed; its processes are ended{left}", file=sys.stderr)


def start_helper(duty: Callable[..., None], *arguments: str, stderr: int | None = None) -> "subprocess.Popen[bytes]":
    """Run a function of this package (standard library only) in a bare interpreter of its own.

    Its stdin ends when the caller closes it or dies. Nothing else that happens to the caller or the study reaches it:
    it has a session of its own and no marker, and lets pass what Slurm sends to every process of a job.
    """
    code = "import importlib, sys; sys.path.append(sys.argv[1])\n"
    code += "getattr(importlib.import_module(sys.argv[2]), sys.argv[3])(*sys.argv[4:])"
    root = str(Path(__file__).parents[2])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)  # which the helper inherits, from its first moment on
    try:
        return subprocess.Popen(
            # -S -s -P: no site, no user site, no working folder.
            [sys.executable, "-S", "-s", "-P", "-c", code, root, duty.__module__, duty.__name__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={name: value for name, value in os.environ.items() if name != STUDY_VARIABLE},
            start_new_session=True,
            cwd="/",
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def drop_helper(helper: "subprocess.Popen[bytes]", seconds: float = DROP_SECONDS) -> None:
    """End a helper, whatever it is doing; one that waits for a dead file system ends with that, some time."""
    helper.kill()
    for pipe in (helper.stdin, helper.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        helper.wait(timeout=seconds)
