"""The records of a study: on node-local disk first, from there copied to OUT by a process of its own.

A process and not a thread: one that waits for a dead file system may be beyond SIGKILL, and a process with such a
thread cannot exit either. Standard library only: the supervisor imports this module.
"""

import contextlib
import json
import os
import re
import select
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinyllm_ray import journal
from tinyllm_ray.errors import ConfigError, TinyllmRayError
from tinyllm_ray.tune.processes import drop_helper, start_helper

JOURNAL_NAME = "trials.jsonl"


class MirroredJournal:
    """Appends to the node-local journal of a study, while a helper brings its lines to OUT."""

    def __init__(self, folder: Path, study: str, out: Path) -> None:
        """`folder` is `private_folder()`; what an earlier run of `study` could not bring to OUT still stands there."""
        self.path = _local_path(folder, study)
        self.target = out / JOURNAL_NAME
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.touch()
        self._helper = start_helper(mirror, str(self.path), str(self.target), stderr=subprocess.PIPE)

    def append(self, records: list[dict[str, Any]]) -> None:
        """Returns when all are on the disk."""
        try:
            journal.append_lines(self.path, records)
        except OSError as error:
            raise TinyllmRayError(f"{self.path} cannot be written: {error}; TMPDIR names the folder for it") from error

    def close(self) -> None:
        """No record comes any more; waits for nothing."""
        assert self._helper.stdin is not None
        self._helper.stdin.close()

    def finish(self, seconds: float, hurry: Callable[[], bool]) -> str | None:
        """Wait until OUT holds every record, then remove the local file; else why it does not, and the file stays."""
        self.close()
        assert self._helper.stderr is not None
        until = time.monotonic() + seconds
        while (status := self._helper.poll()) is None and time.monotonic() < until and not hurry():
            time.sleep(0.01)
        problem = "its file system does not answer" if status is None else self._helper.stderr.read().decode().strip()
        drop_helper(self._helper)
        if status != 0:
            return problem
        self.path.unlink()
        with contextlib.suppress(OSError):  # somebody put something else there
            self.path.parent.rmdir()
        return None


def leftover_records(study: str, out: Path) -> list[dict[str, Any]]:
    """For a study that resumes: records of its earlier run that OUT never got; the supervisor brings them there now."""
    present = journal.read_lines(out / JOURNAL_NAME)
    return [entry for entry in journal.read_lines(_local_path(private_folder(), study)) if entry not in present]


def private_folder() -> Path:
    """Node-local folder for journals, nobody else's to write. Raises ConfigError where there is none."""
    folder = Path(tempfile.gettempdir()) / f"tinyllm_ray-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            folder.chmod(0o700)
            return folder
        problem = "is not a folder of yours"
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
    raise ConfigError(f"{folder} {problem}, and records are kept there first; set TMPDIR to another folder")


def _local_path(folder: Path, study: str) -> Path:
    assert re.fullmatch(r"\w[\w.-]*", study), study  # it names a folder
    return folder / study / JOURNAL_NAME


def mirror(journal_file: str, target_file: str) -> None:
    """The helper: bring every line of the journal to OUT's file, until stdin ends and all are there."""
    position = 0
    while True:
        ended = bool(select.select([0], [], [], 0.5)[0])
        try:
            position = _copy_lines(Path(journal_file), Path(target_file), position)
        except OSError as error:
            position = 0  # part of them may have arrived
            if ended:
                sys.exit(str(error))
        if ended:
            if position and not Path(target_file).exists():
                sys.exit("the folder was removed")
            return


def _copy_lines(source: Path, target: Path, position: int) -> int:
    """Append the whole lines from byte `position` on; from 0, those that `target` does not hold yet."""
    with source.open("rb") as file:
        file.seek(position)
        *lines, _ = file.read().split(b"\n")
    if not lines:
        return position
    missing = lines
    if position == 0 and target.exists():
        present = Counter(target.read_bytes().split(b"\n")[:-1])
        missing = []
        for line in lines:
            present[line] -= 1
            if present[line] < 0:
                missing.append(line)
    journal.append_lines(target, [json.loads(line) for line in missing])
    return position + sum(len(line) + 1 for line in lines)
