"""The page is made in a process of its own, which costs a running study nothing but idle processor time.

The plotting library takes most of a second to import, so one process stays for the whole study and makes a page when
asked (0.2 to 0.5 s each), at the lowest priority there is (SCHED_IDLE), at most every few seconds: a measurement beside
it keeps its cores. Whatever goes wrong with it costs the page alone, which `tune report OUT` makes again.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tinyllm_ray.clock import Deadline
from tinyllm_ray.summary import SUMMARY

PAGE: Final = "report.html"
_REST_SECONDS: Final = 5.0
"""From the begin of one page to that of the next, at least."""
_REST_OVER_COST: Final = 20.0
"""The same in multiples of what a page takes: at most a twentieth of a core."""
_LAST_SECONDS: Final = 3.0
"""For the last page: what a start, an import and a page take on two busy cores."""
_KILLED_SECONDS: Final = 0.2
"""For a killed process to be gone."""


class PageMaker:
    """The study's side: `ask` whenever something has changed, from any thread; never waits and never raises."""

    def __init__(self, out: Path, say: Callable[[str], None]) -> None:
        """`say` is told once what is wrong, if something is."""
        self._out = out
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._broken = False

    def ask(self) -> None:
        """Have the page made as the folder stands, soon."""
        if self._broken:
            return
        try:
            self._process = self._process or self._start()
            assert self._process.stdin is not None
            with contextlib.suppress(BlockingIOError):  # asked thousands of times already
                os.write(self._process.stdin.fileno(), b"\n")
            self._hear()
        except OSError as error:
            self._break(error.strerror or str(error))

    def finish(self, seconds: float = _LAST_SECONDS) -> None:
        """Have the last page made, and end the process within `seconds`."""
        self.ask()
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if _ends_within(seconds, process):
            self._process = process
            self._hear()
            self._process = None
        self._broken = True

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", "tinyllm_ray.tune.page.maker", str(self._out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        for stream in (process.stdin, process.stdout):
            os.set_blocking(stream.fileno(), False)
        return process

    def _hear(self) -> None:
        """Pass on what the process has to say: at most the line that it cannot go on."""
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            line = os.read(self._process.stdout.fileno(), 4096).decode(errors="replace").strip()
            if line:
                self._break(line)

    def _break(self, why: str) -> None:
        if not self._broken:
            self._broken = True
            self._say(f"{self._out / PAGE} cannot be made: {why}")


def bring_up_to_date(out: Path, deadline: Deadline) -> None:
    """Make the page of a study that has ended, where it lags behind, as after a signal; not past `deadline`.

    To be called once the study's processes are gone. Says nothing and raises nothing: the study is done.
    """
    seconds = min(10.0, deadline.remaining() - 1.0)
    if seconds < _LAST_SECONDS or _is_current(out):
        return
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            [sys.executable, "-m", "tinyllm_ray.tune", "report", str(out)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _ends_within(seconds, process)


def _ends_within(seconds: float, process: "subprocess.Popen[bytes]") -> bool:
    """Whether a process ends by itself; one that does not is killed, which a file system that hangs may hold up."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_SECONDS)
    return True


def _is_current(out: Path) -> bool:
    """Whether there is nothing to make a page of, or one that is not older."""
    try:
        changed = max((out / name).stat().st_mtime_ns for name in (SUMMARY, "trials.jsonl"))
    except OSError:
        return True
    try:
        return (out / PAGE).stat().st_mtime_ns >= changed
    except OSError:
        return False


def serve(
    out: Path, requests: int, make: Callable[[Path], object], clock: Callable[[], float] = time.monotonic
) -> None:
    """Make pages as asked by bytes on the descriptor `requests`, the last when it is closed; raises as `make` does."""
    asked = closed = False
    rest_until = clock()
    while not closed or asked:
        due = asked and (closed or clock() >= rest_until)
        if due:
            asked = False
            began = clock()
            make(out)
            rest_until = began + max(_REST_SECONDS, _REST_OVER_COST * (clock() - began))
            continue
        if select.select([requests], [], [], max(0.0, rest_until - clock()) if asked else None)[0]:
            received = os.read(requests, 4096)
            asked, closed = asked or bool(received), not received


def main() -> int:
    """The process: pages of the folder named on the command line, until standard input ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm's, to every process of a job; a last page is due
    with contextlib.suppress(AttributeError, OSError):  # no Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        from tinyllm_ray.tune.page.write import write_page

        serve(Path(sys.argv[1]), sys.stdin.fileno(), write_page)
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
