"""Which processes there are, and waiting for their end without polling; Linux only."""

import os
import select
from pathlib import Path

PATIENCE = 60.0
"""Seconds until a wait for an event is given up; no test depends on it being long or short."""


def ends(pid: int) -> bool:
    """Whether the process is over, or is before patience runs out. It need not be a child."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], PATIENCE)[0])
    finally:
        os.close(process)


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    return _state(pid) not in (None, "Z", "X")


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for the signal; a fork that has not become it yet has ours."""
    if Path(f"/proc/{pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes():
        return False
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def group(leader: int) -> list[int]:
    """The processes of a process group that run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            fields = _fields(int(entry.name))
            if fields and fields[0] not in "ZX" and int(fields[2]) == leader:
                found.append(int(entry.name))
    return found


def _state(pid: int) -> str | None:
    fields = _fields(pid)
    return fields[0] if fields else None


def _fields(pid: int) -> list[str]:
    """State, parent and process group first; the name before them may hold spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
