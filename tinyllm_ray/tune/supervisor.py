"""Owns a study's deadline, its journal and its exit status; the study itself runs in a child process.

Nothing that the child does can make the supervisor late: no hang in C, no Ray process that does not answer, no OUT
folder whose file system hangs (a process of its own copies the journal there). Nothing of the study outlives it: its
processes are found and killed, by a guard process if the supervisor itself is killed.

Standard library only, so that the clock runs before anything slow is imported.
"""

import contextlib
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tinyllm_ray.clock import Deadline
from tinyllm_ray.errors import EXIT_BUG, EXIT_NO_RESULT
from tinyllm_ray.tune.channel import Lines
from tinyllm_ray.tune.child import has_ended, start_child
from tinyllm_ray.tune.mirror import MirroredJournal, private_folder
from tinyllm_ray.tune.processes import drop_helper, end_processes, guard, start_helper
from tinyllm_ray.tune.terminal import show_cursor

GRACE_SECONDS = 5.0
"""For a clean end once told to; before the deadline it is a tenth of the budget where that is less."""
DONE_SECONDS = 10.0
"""For the child's own end after its verdict; a Ray shutdown takes 1 to 4 s on two CPU cores."""
LEFTOVER_SECONDS = 2.0
"""For processes that are already ending when the child has gone; Ray's take up to a second."""
KILL_SECONDS = 1.0
"""Past the deadline, for killed processes to vanish."""
LATE_SECONDS = 1.5
"""Past the deadline, for everything; with the interpreter's own exit it has to be under 2 s."""

_ONE_WISH_SECONDS = 1.0
"""The same signal again so soon is the same wish: a job's launcher passes on what Slurm sends to every process."""
_TICK_SECONDS = 0.1
_SAY_SECONDS = 0.03
_IMPORTED_AT = time.monotonic()


@dataclass(frozen=True)
class Outcome:
    """How a supervised study ended."""

    exit_status: int
    cut: bool
    """Whether the deadline ended it, before it had a verdict of its own."""
    message: str | None
    """Why, on one line: the child's own words, else what became of it; None where there is nothing to say."""
    elapsed_seconds: float
    survivors: tuple[str, ...]
    """Processes that the kernel has not ended yet; empty but for hanging drivers and file systems."""
    journal: Path | None
    """A file with every record: OUT's, or the node-local one where OUT's lags; None if there never was an OUT."""
    mirrored: bool
    """Whether OUT's file holds every record."""


def process_age_seconds() -> float:
    """Seconds since this process was started, interpreter start included where the system tells.

    A shell that ends in `exec python ...` hands its own start time on; as no interpreter takes a minute to get here,
    an age above that is taken for the shell's, and the count starts at this module's import.
    """
    since_import = time.monotonic() - _IMPORTED_AT
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    except FileNotFoundError:  # no Linux
        return since_import
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return age if 0 <= age - since_import <= 60 else since_import


@dataclass
class _Study:
    """What the supervisor has heard about the running study."""

    folder: Path
    """Private and node-local."""
    session: str
    began: float
    """On time.monotonic; what came before the supervisor itself counts too."""
    shares: bool
    """Whether several studies share the budget, so that the seconds of each count from its own begin."""
    journals: list[MirroredJournal] = field(default_factory=list)
    """Of the studies that share the budget, one after the other; records go to the last."""
    whole: MirroredJournal | None = None
    """Where they share it: one without records in the folder of all, whose helper counts the seconds of all."""
    standing: int = EXIT_NO_RESULT
    verdict: int | None = None
    message: str | None = None
    signals: list[int] = field(default_factory=list)
    forwarded: bool = False
    cut: bool = False
    kill_at: float = math.inf
    """On time.monotonic, beside the deadline."""

    def kill_within(self, seconds: float) -> None:
        self.kill_at = min(self.kill_at, time.monotonic() + seconds)


def supervise(
    command: Sequence[str],
    *,
    request: Mapping[str, Any],
    deadline: Deadline,
    grace_seconds: float = GRACE_SECONDS,
) -> Outcome:
    """Run `command` as a study's child; returns at most LATE_SECONDS after the deadline, whatever the child does.

    The child is told to end (SIGTERM) a grace before the deadline, and killed with all it started at the deadline. In
    the main thread SIGINT and SIGTERM (SIGUSR1 and SIGHUP for one, too) are forwarded to it once; a second one kills.
    Raises ConfigError before anything is started where the node-local journal cannot be kept.
    """
    started = time.monotonic()
    marker = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    study = _Study(private_folder(), marker, started - request.get("age_seconds", 0.0), bool(request.get("presets")))
    last_call = deadline.earlier_by(min(grace_seconds, max(0.0, deadline.remaining()) / 10))
    with _collected_signals(study.signals):
        keeper = start_helper(guard, marker)
        child, lines = start_child(command, request, max(0.0, last_call.remaining()), marker)
        try:
            _tell(keeper, child.pid)
            _watch(study, child, lines, last_call, deadline, grace_seconds)
        finally:
            left = max(0.0, deadline.remaining())
            survivors = end_processes(
                marker,
                child.pid,
                patience_seconds=min(LEFTOVER_SECONDS, left) if has_ended(child) else 0.0,
                limit_seconds=min(DONE_SECONDS, left) + KILL_SECONDS,
            )
            drop_helper(keeper)
            if study.verdict is None:
                show_cursor()
            if survivors:
                _say(f"killed, but not ended by the kernel yet: {', '.join(survivors)}")
        while (messages := lines.read(0)) is not None and deadline.remaining() > -LATE_SECONDS:
            _receive(study, lines, messages)
        lines.close()
        behind = _finish(study, deadline)
    lagging, last = next(iter(behind), None), next(reversed(study.journals), None)
    records = lagging.path if lagging else last.target if last else None
    return Outcome(
        exit_status=_exit_status(study, child.poll(), records),
        cut=study.cut,
        message=study.message,
        elapsed_seconds=time.monotonic() - started,
        survivors=tuple(survivors),
        journal=records,
        mirrored=bool(study.journals) and not behind,
    )


def _watch(
    study: _Study,
    child: "subprocess.Popen[bytes]",
    lines: Lines,
    last_call: Deadline,
    deadline: Deadline,
    grace_seconds: float,
) -> None:
    """Until the child has ended by itself or has to be killed."""
    told = False
    while not has_ended(child):
        _receive(study, lines, lines.read(_TICK_SECONDS) or [])
        if len(study.signals) > 1 or time.monotonic() >= study.kill_at or deadline.remaining() <= 0:
            study.cut |= deadline.remaining() <= 0 and study.verdict is None and not study.signals
            return
        # os.kill, as Popen.send_signal would reap the child and free its number.
        if study.signals and not study.forwarded:
            study.forwarded = True
            os.kill(child.pid, study.signals[0])
            study.kill_within(grace_seconds)
        elif last_call.remaining() <= 0 and not told and study.verdict is None:
            told = True
            study.cut = not study.signals
            os.kill(child.pid, signal.SIGTERM)


def _receive(study: _Study, lines: Lines, messages: list[dict[str, Any]]) -> None:
    records: dict[int, dict[str, Any]] = {}
    for message in messages:
        match message:
            case {"type": "out", "study": str(identifier), "path": str(path)}:
                _keep(study, lines, records)
                records = {}
                for earlier in study.journals[-1:]:
                    earlier.close()
                began = time.monotonic() if study.shares else study.began
                target = Path(path).absolute()
                if study.shares and study.whole is None:
                    name = f"{identifier}-all"
                    study.whole = MirroredJournal(study.folder, name, target.parent, study.session, study.began)
                study.journals.append(MirroredJournal(study.folder, identifier, target, study.session, began))
            case {"type": "record", "number": int(number), "record": dict(record)}:
                records[number] = record
            case {"type": "standing", "exit_status": int(status)}:
                study.standing = status
            case {"type": "done", "exit_status": int(status)} if study.verdict is None:
                # After a signal the status is the signal's, whatever the child makes of its clean end.
                study.verdict = None if study.signals else status
                study.message = message.get("message")
                study.kill_within(DONE_SECONDS)
            case {"type": "done"}:
                pass  # the first verdict counts, whatever becomes of the clean-up after it
            case _:
                raise AssertionError(f"the study sent an unknown message: {message}")
    _keep(study, lines, records)


def _keep(study: _Study, lines: Lines, records: dict[int, dict[str, Any]]) -> None:
    if records:
        assert study.journals, "the study sent a record before it named its OUT"
        study.journals[-1].append(list(records.values()))
        lines.acknowledge(max(records))


def _finish(study: _Study, deadline: Deadline) -> list[MirroredJournal]:
    """Let the last lines arrive in OUT, those of all studies at once; the journals that lag behind."""
    until = time.monotonic() + min(DONE_SECONDS, max(0.1, deadline.remaining() + LATE_SECONDS))
    journals = [*study.journals, *([study.whole] if study.whole else [])]
    for records in journals:
        records.close()
    behind = []
    for records in journals:
        problem = records.finish(max(0.0, until - time.monotonic()), hurry=lambda: len(study.signals) > 1)
        if problem is not None and records is not study.whole:
            _say(f"{records.target} lags behind: {problem}")
            _say(f"every record is in {records.path}; --resume on this machine takes them over")
            behind.append(records)
    return behind


def _exit_status(study: _Study, code: int | None, records: Path | None) -> int:
    """The child's verdict, else what became of the child (`code` is None for one that even SIGKILL did not end)."""
    where = f"; its records are in {records}" if records else ""
    if study.verdict is not None:
        return study.verdict
    if study.signals:
        return 128 + study.signals[0]
    if code is not None and code >= 0:
        return code
    if study.cut:
        study.message = f"the study did not end by itself and was ended at the deadline{where}"
        _say(study.message)
        return study.standing
    reason = f"by {signal.Signals(-code).name}" if code else ""
    study.message = f"the study's process died {reason} without a verdict{where}"
    _say(study.message)
    return EXIT_BUG


def _tell(keeper: "subprocess.Popen[bytes]", child: int) -> None:
    assert keeper.stdin is not None
    keeper.stdin.write(b"%d\n" % child)
    keeper.stdin.flush()


@contextlib.contextmanager
def _collected_signals(received: list[int]) -> Iterator[None]:
    """Signals are noted, not acted on, SIGUSR1 and SIGHUP as SIGTERM; outside of the main thread nothing changes."""
    heard: dict[int, float] = {}

    def note(number: int, frame: FrameType | None) -> None:
        wish = number if number == signal.SIGINT else signal.SIGTERM
        before, heard[wish] = heard.get(wish, -math.inf), time.monotonic()
        if heard[wish] - before > _ONE_WISH_SECONDS:
            received.append(wish)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a background job's Ctrl-C, and nohup, stay ignored
                previous[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    """Unless nobody takes it: a terminal held by Ctrl-S, a full pipe to a pager that waits."""
    with contextlib.suppress(OSError, AttributeError):  # `2>&-` leaves no standard error
        if not select.select([], [sys.stderr.fileno()], [], _SAY_SECONDS)[1]:
            return
    with contextlib.suppress(OSError):  # a log on a disk that is full
        print(f"tinyllm_ray: {line}", file=sys.stderr, flush=True)
