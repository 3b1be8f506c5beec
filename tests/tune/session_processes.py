"""A session's processes as one who kills them sees them."""

import contextlib
import os
import signal
import time
from pathlib import Path


class Ended:
    """Whether a forked process has ended, and how."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def __call__(self) -> bool:
        if self._status is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._status = os.waitstatus_to_exitcode(found[1])
        return self._status is not None

    def wait(self) -> int:
        while not self():
            time.sleep(0.002)
        assert self._status is not None
        return self._status


def children(pid: int) -> dict[str, int]:
    """A supervisor's processes: study, guard and mirror, as far as they have started."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", entry, "stat").read_bytes().rpartition(b") ")[2].split()
                if int(fields[1]) == pid:
                    words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                    duty = {b"guard": "guard", b"mirror": "mirror", b"tell_used": "reader"}
                    found[next((duty[word] for word in words if word in duty), "study")] = int(entry)
    return found


def stall(pid: int, seconds: float) -> None:
    """Keep the processor from a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    if os.fork() == 0:
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        os._exit(0)


def alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_bytes().rpartition(b") ")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def copies(pid: int) -> bool:
    """Whether this is a helper that copies a journal, and not a later process with its number."""
    with contextlib.suppress(OSError):
        return alive(pid) and b"mirror" in Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    return False
