"""One session of a study at a time: a lock on the study's definition, as long as the process lives."""

import fcntl
import os
import time
from pathlib import Path
from typing import BinaryIO

from tinyllm_ray.errors import ConfigError

_PATIENCE_SECONDS = 20.0
"""A killed session's processes are ended within a second or two; one that closes stops Ray, up to 4 s."""
_HELD: dict[tuple[int, int], BinaryIO] = {}
"""By device and inode."""


def claim(definition: Path, patience_seconds: float = _PATIENCE_SECONDS) -> None:
    """Lock a study's definition for this process. Raises ConfigError where another session goes on running.

    What this process has locked already it keeps. A file system that knows no locks is trusted.
    """
    try:
        file = definition.open("r+b")
    except OSError as error:
        raise ConfigError(
            f"{definition}: {error.strerror}; a study that goes on has to be able to write there"
        ) from None
    status = os.fstat(file.fileno())
    name = status.st_dev, status.st_ino
    if name in _HELD:
        file.close()
        return
    until = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                file.close()
                raise ConfigError(
                    f"{definition.parent}: a session of this study is running; wait until it has ended, or end it"
                ) from None
            time.sleep(0.02)
            continue
        except OSError:
            pass
        _HELD[name] = file
        return
