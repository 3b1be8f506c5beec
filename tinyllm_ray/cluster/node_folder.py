"""A job's own folder on a node, for Ray's files, its secret and what is staged: private, locked, gone with the job.

Standard library only: a node's step imports this module.
"""

import fcntl
import os
import shutil
import stat
import sys
import time
from pathlib import Path

from tinyllm_ray.cluster.descendants import end_descendants
from tinyllm_ray.cluster.stage_place import NAME, stage_folder
from tinyllm_ray.errors import ConfigError

PATIENCE_SECONDS = 3.0
"""For Ray's processes to end once told to."""
LIMIT_SECONDS = 10.0
"""For them to vanish once killed, told seconds included."""
_SETTLED_SECONDS = 60.0
_STAGED_SECONDS = 1800.0
"""A folder with staged files waits for its step, which on all nodes but the first comes after the head is ready."""
_FOLDER = "tr"


class NodeFolder:
    """The job's own folder on this node; entered, it is locked; left, everything Ray started is gone, and then it."""

    def __init__(self, scratch: str, job: int, staged: bool) -> None:
        """`staged`: files that the job has put there already stay."""
        self.path = job_folder(scratch, os.getuid(), job)
        self.stage = stage_folder(self.path, os.getuid(), job)
        self._keep = {self.stage} if staged else set()
        self._lock = -1

    def __enter__(self) -> "NodeFolder":
        clear_left_behind(self.path)
        self._lock = claim(self.path)
        for path in set(self.path.iterdir()) - self._keep:  # of the same job before it was requeued
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        left = end_descendants(PATIENCE_SECONDS, LIMIT_SECONDS)
        if left:
            print(f"tinyllm_ray: not ended by the kernel yet: {', '.join(left)}", file=sys.stderr, flush=True)
        for path in (self.stage, self.path):
            shutil.rmtree(path, ignore_errors=True)
        os.close(self._lock)

    def write_token(self, secret: bytes) -> Path:
        """The cluster's secret in a file that only its owner reads. Raises ConfigError where none came."""
        if not secret.strip():
            raise ConfigError("the launcher was gone before it gave its secret")
        path = self.path / "token"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret.strip())
        return path


def job_folder(scratch: str, user: int, job: int) -> Path:
    """The same on every node, as a worker's Ray takes its path from the head; short, as sockets lie 60 deeper."""
    return Path(scratch) / f"{_FOLDER}{user}-{job}"


def claim(folder: Path) -> int:
    """Make a private folder and lock it; the lock's descriptor. Raises ConfigError where it is taken or another's."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or stat.S_IMODE(found.st_mode) != 0o700:
            raise ConfigError(
                f"{folder} is there and not a private folder of yours; remove it, or give another scratch"
            )
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}); give the site a scratch folder") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{folder} is in use by another cluster of this job; one runs at a time") from None
    return descriptor


def clear_left_behind(own: Path) -> None:
    """Remove this user's folders beside `own` that no running step holds: those of jobs whose steps were killed."""
    prefix = own.name.rpartition("-")[0]
    for folder in own.parent.glob(f"{prefix}-*"):
        try:
            found = folder.lstat()
            # A folder of this minute may be another job's that is about to lock it.
            settled = _STAGED_SECONDS if (folder / NAME).is_dir() else _SETTLED_SECONDS
            if found.st_uid != os.getuid() or time.time() - found.st_ctime < settled:
                continue
            lock = claim(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
        except (OSError, ConfigError):
            continue
