"""A run's folder: taken when it is new, gone on with when asked to, locked while a run is in it.

Standard library and the root's modules only: it is asked before PyTorch is imported.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinyllm_ray import journal
from tinyllm_ray.errors import ConfigError

RESULT = "result.json"
"""What only a run writes, from its start on: by this file a folder is known as a run's."""

_LOCK = ".lock"
_METRICS = "metrics.jsonl"
_CURVES = ("evaluations.jsonl", _METRICS)


def prepare_folder(out: Path, resume: bool = False) -> None:
    """Make the run's folder; one in which no update was made yet counts as new.

    Raises ConfigError where it cannot be made, where it holds something else than a run, and without `resume` where it
    holds a run.
    """
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in out.iterdir() if not journal.is_torn(entry)} - {_LOCK, "train.log"}
        begun = has_begun(out)
    if names and RESULT not in names:
        raise ConfigError(f"--out {out}: the folder is not empty, and holds no run; choose another or remove it")
    if begun and not resume:
        raise ConfigError(f"--out {out}: the folder holds a run; go on with it by --resume, or choose another folder")


def has_begun(out: Path) -> bool:
    """Whether a run in the folder has made an update."""
    metrics = out / _METRICS
    return any(out.glob("checkpoints/step-*")) or (metrics.exists() and metrics.stat().st_size > 0)


@contextlib.contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Hold the folder for one process. Raises ConfigError where another one holds it.

    A file system without locks lets everyone in: a run there is no worse off than without asking.
    """
    with writable(out):
        lock = (out / _LOCK).open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {out}: another process trains in this folder; wait for its end") from None
        except OSError as error:
            logging.getLogger(__name__).info("%s is not locked: %s", out, error)
        yield


def begin_log(out: Path) -> None:
    """Have the process log into the run's train.log. Raises ConfigError where that cannot be written."""
    logging.raiseExceptions = False  # a full disk: the run says so once, a traceback for every line helps nobody
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    with writable(out):
        logging.basicConfig(filename=out / "train.log", level=logging.INFO, format=line)


def begin_result(out: Path, configuration: str) -> dict[str, Any]:
    """Write config.yaml, have result.json say that a run is under way, and return what it said before.

    Raises ConfigError where they cannot be written.
    """
    before = {key: value for key, value in read_result(out).items() if key not in {"pid", "host"}}
    running = {**before, "status": "running", "pid": os.getpid(), "host": socket.gethostname()}
    with writable(out):
        # First: a session that is killed in between leaves a run's folder, which the next one takes.
        journal.write_atomically(out / RESULT, (json.dumps(running, indent=2) + "\n").encode())
        journal.write_atomically(out / "config.yaml", configuration.encode())
    return before


def read_result(out: Path) -> dict[str, Any]:
    """What result.json holds; empty where there is none that can be read."""
    try:
        result = json.loads((out / RESULT).read_text())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def left_at_start(before: dict[str, Any], number: int) -> dict[str, Any]:
    """The result of a session that a signal ended before its first update: what was reached before, interrupted.

    A run that was complete still is.
    """
    if before.get("status") == "complete":
        return before
    return {"step": 0, **before, "status": "interrupted", "signal": number, "stage": "start", "fault": None}


def leave_before_start(out: Path, resume: bool, number: int) -> None:
    """Have result.json say that a signal came before the run had its folder.

    A folder that is not the run's to take, or in which another process trains, stays as it is.
    """
    with contextlib.suppress(ConfigError, OSError):  # the process ends right after, by a signal, and says so
        prepare_folder(out, resume)
        with lock_folder(out):
            result = left_at_start(read_result(out), number)
            journal.write_atomically(out / RESULT, (json.dumps(result, indent=2) + "\n").encode())


def bring_curves(checkpoint: Path, out: Path) -> None:
    """Copy what the run of a checkpoint in another folder recorded, which a run that goes on from there starts with.

    The last of the files is the one by which a run has begun: a session that is killed before it copies them again.
    Raises ConfigError where that cannot be written.
    """
    folder = checkpoint.resolve().parent
    if folder.name != "checkpoints" or has_begun(out):
        return
    with writable(out):
        for name in _CURVES:
            if (folder.parent / name).exists():
                journal.write_atomically(out / name, (folder.parent / name).read_bytes())


@contextlib.contextmanager
def writable(out: Path) -> Iterator[None]:
    """Has what fails to be written inside raise ConfigError instead of OSError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}; choose a folder that can be written") from None
