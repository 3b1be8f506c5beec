"""Append-only JSON Lines that survive a crash at any byte.

A record counts once its line, newline included, is on disk. What a crash left after the last newline was never
recorded: readers leave it out and the next append removes it. Standard library only: the supervisor imports this.
"""

import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tinyllm_ray.errors import TinyllmRayError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append one JSON object and return when it is on the disk (fsync)."""
    append_lines(path, [entry])


def append_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Append JSON objects and return when all are on the disk; a crash meanwhile leaves the first of them or none."""
    lines = [json.dumps(entry, separators=(",", ":"), allow_nan=False) + "\n" for entry in entries]
    with path.open("ab+") as file:
        file.truncate(_end_of_last_line(file))
        file.write("".join(lines).encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every recorded object in order; a missing file holds none.

    Raises TinyllmRayError where it cannot be read, and naming the line when one before the end is damaged: that is not
    a crash's doing.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TinyllmRayError(f"{path} cannot be read: {error.strerror}") from None
    entries = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise TinyllmRayError(f"{path}: line {number} is damaged and holds no JSON record: {error}") from error
        if not isinstance(entry, dict):
            raise TinyllmRayError(f"{path}: line {number} is damaged and holds no JSON record, but {line[:40]!r}")
        entries.append(entry)
    return entries


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` in one step: a reader sees the old content or the whole of the other, never a part."""
    with _written_beside(path, data) as temporary:
        temporary.replace(path)


def write_first(path: Path, data: bytes) -> None:
    """Write `path` in one step where nobody has; of several at it at once, one. Raises FileExistsError for the others.

    A file system without hard links is trusted to have no others.
    """
    with _written_beside(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            temporary.replace(path)


@contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """A file beside `path` that holds `data` on the disk, and is gone afterwards."""
    # Two threads, or two nodes with equal process numbers, must not write the same one.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def is_torn(path: Path) -> bool:
    """Whether `write_atomically` was killed, or is at it, where it left this file."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_torn(folder: Path) -> None:
    """Remove what killed writers left in a folder that has no living one; a missing folder holds none."""
    if folder.is_dir():
        for path in folder.iterdir():
            if is_torn(path):
                path.unlink(missing_ok=True)


def _end_of_last_line(file: BinaryIO) -> int:
    """Byte position just after the last newline of an open binary file."""
    position = file.seek(0, os.SEEK_END)
    while position:
        start = max(0, position - 65536)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0
