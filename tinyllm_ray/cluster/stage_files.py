"""The files of a folder that is to be packed, asked for by many threads at once. Standard library only."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

_ASKING = 32
_CHUNK = 64
"""Files that one thread asks for together."""


@dataclass(frozen=True)
class Entry:
    """One file to pack."""

    path: Path
    name: str
    """Where it goes, relative to the place that it is unpacked to."""
    size: int
    modified_ns: int
    is_link: bool
    """A link to a folder, which stays one; a link to a file becomes the file."""
    to_compile: bool = False
    """Whether `name` is to be the bytecode of the module at `path`."""


def entries(root: Path, prefix: str = "", leave_out: Callable[[str], bool] = lambda name: False) -> list[Entry]:
    """All files below `root`, in order; names that `leave_out` takes, and what is below them, are not among them.

    Many threads ask, as all they do is wait: an environment with PyTorch and Ray has 6,000 folders and 50,000 files, of
    which a shared file system that takes a millisecond for an answer tells in a minute and a half where one asks.
    """
    with ThreadPoolExecutor(_ASKING) as pool:
        found = list(_listed(pool, root, prefix, leave_out))
        chunks = [found[at : at + _CHUNK] for at in range(0, len(found), _CHUNK)]
        looked = [entry for chunk in pool.map(_look_at, chunks) for entry in chunk]
    return sorted(looked, key=lambda entry: entry.name)


_Listed = tuple[str, os.DirEntry[str]]
"""A file, and where it goes."""


def _listed(pool: ThreadPoolExecutor, root: Path, prefix: str, leave_out: Callable[[str], bool]) -> Iterator[_Listed]:
    answers: SimpleQueue[Future[tuple[list[_Listed], list[tuple[str, str]]]]] = SimpleQueue()
    waiting = [(str(root), prefix)]
    asked = 0
    while waiting or asked:
        for folder, place in waiting:
            pool.submit(_list, folder, place, leave_out).add_done_callback(answers.put)
        asked += len(waiting) - 1
        files, waiting = answers.get().result()
        yield from files


def _list(folder: str, place: str, leave_out: Callable[[str], bool]) -> tuple[list[_Listed], list[tuple[str, str]]]:
    """The files in a folder and the folders in it, with the places where they go."""
    with os.scandir(folder) as listed:
        named = [(f"{place}/{item.name}" if place else item.name, item) for item in listed]
    kept = [(name, item, item.is_dir(follow_symlinks=False)) for name, item in named if not leave_out(name)]
    files = [(name, item) for name, item, is_folder in kept if not is_folder]
    return files, [(item.path, name) for name, item, is_folder in kept if is_folder]


def _look_at(listed: Sequence[_Listed]) -> list[Entry]:
    found = []
    for name, item in listed:
        with contextlib.suppress(OSError):  # a link into nowhere, a file that has just gone
            status, is_link = item.stat(), item.is_dir()
            found.append(Entry(Path(item.path), name, status.st_size, status.st_mtime_ns, is_link))
    return found
