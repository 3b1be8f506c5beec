"""A process's descendants, those that left their parents included, found and ended.

Standard library only.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_SECONDS = 0.05
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def adopt_orphans() -> None:
    """Have descendants whose parent ends become children of this process (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it is gone; for `preexec_fn`."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def descendants(keep: Iterable[int] = ()) -> dict[int, str]:
    """Living descendants of this process by number, with their names; without `keep` and what descends from those."""
    names, children = _processes()
    kept, found, waiting = set(keep), {}, [os.getpid()]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child in kept:
                continue
            waiting.append(child)
            if child in names:
                found[child] = names[child]
    return found


def end_descendants(patience_seconds: float, limit_seconds: float, keep: Iterable[int] = ()) -> list[str]:
    """SIGTERM for every descendant, SIGKILL after `patience_seconds`; what is still there after `limit_seconds`."""
    kept = set(keep)
    start = time.monotonic()
    told: set[int] = set()
    while left := descendants(kept):
        seconds = time.monotonic() - start
        if seconds > limit_seconds:
            break
        for process in left:
            number = signal.SIGKILL if seconds >= patience_seconds else signal.SIGTERM
            if number == signal.SIGKILL or process not in told:
                told.add(process)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
        reap(kept)
        time.sleep(_TICK_SECONDS)
    reap(kept)
    return [f"{name} ({process})" for process, name in left.items()]


def reap(keep: Iterable[int] = ()) -> list[int]:
    """Collect ended children, all but `keep`; their numbers."""
    ended = []
    for process in set(_processes()[1].get(os.getpid(), [])) - set(keep):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(process, os.WNOHANG)[0]:
                ended.append(process)
    return ended


def _processes() -> tuple[dict[int, str], dict[int, list[int]]]:
    """Names of all living processes, and everyone's children, ended ones that nobody has collected included."""
    names: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            text = (folder / "stat").read_text(errors="replace")
        except OSError:
            continue  # it has ended
        name, _, rest = text.partition("(")[2].rpartition(") ")
        state, parent = rest.split()[:2]
        if state not in "ZX":
            names[int(folder.name)] = name
        children.setdefault(int(parent), []).append(int(folder.name))
    return names, children
