"""The records of a study: on node-local disk first, from there copied to OUT by a process of its own.

A process and not a thread: one that waits for a dead file system may be beyond SIGKILL, and a process with such a
thread cannot exit either. Standard library only: the supervisor imports this module.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import select
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tinyllm_ray import journal
from tinyllm_ray.errors import ConfigError, TinyllmRayError
from tinyllm_ray.tune.processes import DROP_SECONDS, drop_helper, start_helper
from tinyllm_ray.tune.sessions import SESSIONS, SIGN_OF_LIFE_SECONDS, write_session

JOURNAL_NAME = "trials.jsonl"
MEMORY = Path("/dev/shm")
"""Where a journal goes on when its disk is full: it survives all processes there, though not the node."""

_LOOK_SECONDS = 0.5
_TURN_SECONDS = 0.02


class MirroredJournal:
    """Appends to a session's node-local journal, while a helper brings its lines to OUT and counts its seconds."""

    def __init__(self, folder: Path, study: str, out: Path, session: str, began: float) -> None:
        """`folder` is `private_folder()`; what earlier sessions of `study` could not bring to OUT still stands there.

        `session` is a name used once, `began` its begin on time.monotonic.
        """
        self._disk = _local_folder(folder, study)
        self.path = self._disk / f"{session}.jsonl"
        self.target = out / JOURNAL_NAME
        self._began = began
        self._live = _hold(self.path)
        self._start_helper()

    def append(self, records: list[dict[str, Any]]) -> None:
        """Returns when all are on the disk; in memory where the disk takes no more."""
        try:
            journal.append_lines(self.path, records)
        except OSError as error:
            try:
                self._move_to_memory(records)
            except OSError:
                words = f"{self.path} cannot be written: {error}; TMPDIR names the folder for it"
                raise TinyllmRayError(words) from error
        if self._was_killed():
            self._start_helper()

    def close(self) -> None:
        """No record comes any more, and no second counts; waits for nothing."""
        if self._was_killed():
            self._start_helper()
        assert self._helper.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # closed already
            self._helper.stdin.write(b"ended")
            self._helper.stdin.close()

    def finish(self, seconds: float, hurry: Callable[[], bool]) -> str | None:
        """Wait until OUT holds every record and the local file is gone; else say why not, and the file stays."""
        self.close()
        assert self._helper.stderr is not None
        until = time.monotonic() + seconds
        while (status := self._helper.poll()) is None and time.monotonic() < until and not hurry():
            time.sleep(0.01)
        problem = "its file system does not answer" if status is None else self._helper.stderr.read().decode().strip()
        drop_helper(self._helper, min(DROP_SECONDS, seconds))
        self._live.close()
        return None if status == 0 else problem or f"the process that copies was ended ({status})"

    def _move_to_memory(self, records: list[dict[str, Any]]) -> None:
        """Go on there with all that stands on the disk, and free that. Raises OSError where that cannot be."""
        disk, path = self.path, _local_folder(_own_folder(MEMORY), self._disk.name) / self.path.name
        if path == disk:
            raise OSError("memory is full as well")
        drop_helper(self._helper)
        live, present = _hold(path), journal.read_lines(disk)
        journal.append_lines(path, present + [record for record in records if record not in present])
        self._live.close()
        self._live, self.path = live, path
        disk.unlink(missing_ok=True)
        self._start_helper()

    def _start_helper(self) -> None:
        arguments = (str(self.path), str(self.target), repr(self._began), str(self._disk))
        self._helper = start_helper(mirror, *arguments, stderr=subprocess.PIPE)

    def _was_killed(self) -> bool:
        """By whoever; one that ends by itself has been told to, and at 0 has nothing left to do."""
        return self._helper.poll() not in (None, 0)


def await_earlier_helper(study: str, patience_seconds: float = 10.0) -> None:
    """Return once no helper of an earlier session is at work on this machine, or the patience is over.

    A killed session's helper is still bringing its last records, and its seconds, for a moment.
    """
    until = time.monotonic() + patience_seconds
    try:
        folder = os.open(_local_folder(private_folder(), study), os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.02)
    finally:
        os.close(folder)


def all_records(study: str, out: Path) -> list[dict[str, Any]]:
    """Every record of a study to go on with: OUT's, and those of earlier sessions on this machine that OUT lacks.

    The supervisor's helper adds these to OUT. An earlier session's helper may be doing that right now: what has left
    the local files between the two looks is in OUT by the second.
    """
    folders = _folders(_local_folder(private_folder(), study))
    # One that is removed between the two holds none.
    local = [entry for path in _journals(folders) for entry in journal.read_lines(path)]
    present = journal.read_lines(out / JOURNAL_NAME)
    return present + [entry for entry in local if entry not in present]


def private_folder() -> Path:
    """Node-local folder for journals, nobody else's to write. Raises ConfigError where there is none."""
    place = Path(tempfile.gettempdir())
    try:
        return _own_folder(place)
    except OSError as error:
        raise ConfigError(
            f"{place / _name()} cannot be used: {error.strerror or error}, and records are kept there first; "
            "set TMPDIR to another folder"
        ) from None


def _own_folder(place: Path) -> Path:
    folder = place / _name()
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise OSError("it is not a folder of yours")
    folder.chmod(0o700)
    return folder


def _name() -> str:
    return f"tinyllm_ray-{os.getuid()}"


def _local_folder(folder: Path, study: str) -> Path:
    assert re.fullmatch(r"\w[\w.-]*", study), study  # it names a folder
    return folder / study


def _hold(path: Path) -> BinaryIO:
    """Make a session's journal and lock it as long as the supervisor lives: what is locked has not been left behind."""
    while True:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # An earlier session's helper takes what nobody holds for left behind, and removes it.
        with contextlib.suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                stack.pop_all()
                return file
        time.sleep(0.01)


def _folders(disk: Path) -> list[Path]:
    """Where sessions of the study whose local folder is `disk` may have left journals on this machine."""
    memory = MEMORY / _name()
    with contextlib.suppress(OSError):
        return [disk, memory / disk.name] if memory.lstat().st_uid == os.getuid() else [disk]
    return [disk]


def _journals(folders: Sequence[Path]) -> list[Path]:
    """Of a study's sessions on this machine, by their last records, oldest first."""
    changed = {}
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    changed[folder / name] = (folder / name).stat().st_mtime_ns
    return sorted(changed, key=lambda path: changed[path])


def mirror(journal_file: str, target_file: str, began: str, disk_folder: str) -> None:
    """The helper: bring every line of the journal to OUT's file, until stdin ends and all are there.

    What earlier sessions left beside the journal is brought first. One helper at a time: that of a session whose
    supervisor was killed may be copying its last lines. A word on stdin says that the session closes by itself.
    """
    own, target, supervisor = Path(journal_file), Path(target_file), _Stdin()
    folders = _folders(Path(disk_folder))
    _take_turn(folders[0], supervisor)
    position, left_behind, noted = 0, True, -math.inf
    while True:
        supervisor.look(_LOOK_SECONDS)
        ended = supervisor.gone_at is not None
        try:
            # One that came so late that another helper has brought its journal leaves all others' alone.
            if own.exists():
                if left_behind:
                    _bring_what_is_left(own, target, folders)
                    left_behind = False
                position = _copy_lines(own, target, position)
            if ended or time.monotonic() - noted >= SIGN_OF_LIFE_SECONDS:
                noted = time.monotonic()
                write_session(target.parent, own.stem, float(began), supervisor.gone_at or noted, supervisor.closes)
        except OSError as error:
            position, left_behind = 0, True  # part of them may have arrived
            if ended:
                sys.exit(str(error))
        if ended:
            if position and not target.exists():
                sys.exit("the folder was removed")
            own.unlink(missing_ok=True)
            for folder in {own.parent, *folders}:
                with contextlib.suppress(OSError):  # another session's journal is there
                    folder.rmdir()
            return


class _Stdin:
    """What the supervisor says, and when it was gone."""

    def __init__(self) -> None:
        self.closes = False
        """By itself, and not killed."""
        self.gone_at: float | None = None
        """On time.monotonic."""

    def look(self, seconds: float) -> None:
        """Wait so long for a word, or for its end."""
        if self.gone_at is None and select.select([0], [], [], seconds)[0]:
            word = os.read(0, 64)
            self.closes |= bool(word)
            self.gone_at = None if word else time.monotonic()


def _take_turn(folder: Path, supervisor: _Stdin) -> None:
    """Wait for the helpers of earlier sessions; meanwhile a session may end, and lasts no longer for that."""
    with contextlib.suppress(FileNotFoundError):  # another helper has brought all that was there
        descriptor = os.open(folder, os.O_RDONLY)
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            supervisor.look(_TURN_SECONDS)
            time.sleep(_TURN_SECONDS)


def _bring_what_is_left(own: Path, target: Path, folders: Sequence[Path]) -> None:
    """Bring the records of earlier sessions, oldest first, and remove what they left."""
    journal.remove_torn(target.parent / SESSIONS)
    for path in _journals(folders):
        if path == own:
            continue
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # its supervisor lives: this helper comes late
                continue
            _copy_lines(path, target, 0)
            path.unlink()


def _copy_lines(source: Path, target: Path, position: int) -> int:
    """Append the whole lines from byte `position` on; from 0, those that `target` does not hold yet."""
    *lines, _ = source.read_bytes()[position:].split(b"\n")
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
