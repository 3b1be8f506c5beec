"""Builds a folder once, whoever comes first: others wait, and a builder that dies leaves nothing that is used."""

import contextlib
import fcntl
import glob
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from tinyllm_ray.clock import Deadline

_POLL_SECONDS = 0.1
_ABANDONED_SECONDS = 3600.0  # a folder that nobody wrote to for this long has no builder any more


def build_once(
    target: Path,
    build: Callable[[Path], None],
    ready: Callable[[Path], bool],
    *,
    wait_seconds: float = 600.0,
    waiting: Callable[[], None] = lambda: None,
) -> None:
    """Make `target` a folder that is `ready`, by `build` into a sibling folder that then takes its name.

    While another process builds, wait for it (`waiting` is called once), at most `wait_seconds`. After that, and on
    file systems without locks, build as well: whoever is done first wins. A target that is there but not ready is
    replaced. Raises OSError where the parent folder cannot be written.
    """
    if ready(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(f".{target.name}.lock"), wait_seconds, waiting) as locked:
        if ready(target):
            return
        _remove_leftovers(target, locked)
        folder = _new_sibling(target)
        try:
            folder.mkdir()
            build(folder)
            _put_in_place(folder, target, ready)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, target: Path, ready: Callable[[Path], bool]) -> None:
    if ready(target):
        return
    aside = _new_sibling(target)
    with contextlib.suppress(FileNotFoundError):
        target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        # Without a lock another process may have come first; then its folder is as good.
        if not ready(target):
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path, wait_seconds: float, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock of `path` where that is possible, and say whether it is held."""
    # The file stays: removing it would let two processes hold locks on two files of one name.
    with path.open("ab") as file:
        yield _acquire(file.fileno(), wait_seconds, waiting)


def _acquire(descriptor: int, wait_seconds: float, waiting: Callable[[], None]) -> bool:
    deadline = Deadline.after(wait_seconds)
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if deadline.remaining() <= 0:
                return False
        except OSError:
            return False  # "no locks available" on some network file systems
        if not told:
            waiting()
            told = True
        time.sleep(_POLL_SECONDS)


def _prefix(target: Path) -> str:
    return f".{target.name}.building-"


def _new_sibling(target: Path) -> Path:
    return target.with_name(f"{_prefix(target)}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}")


def _remove_leftovers(target: Path, locked: bool) -> None:
    """Remove what dead builders left. Only under the lock is a process number proof: another host may share it."""
    here = f"{_prefix(target)}{socket.gethostname()}-"
    for name in glob.glob(f"{glob.escape(_prefix(target))}*", root_dir=target.parent):
        folder = target.parent / name
        dead = locked and name.startswith(here) and not _alive(name.removeprefix(here).partition("-")[0])
        if dead or _age_seconds(folder) > _ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _alive(process: str) -> bool:
    if not process.isdecimal() or int(process) == os.getpid():
        return False  # this process has begun nothing yet: the number was another's
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _age_seconds(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0
