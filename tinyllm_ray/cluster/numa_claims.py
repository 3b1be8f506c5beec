"""Which cores and GPUs of this machine the trials of one user have: locks on bytes of a file, gone with their process.

A claim needs nobody to give it back, holds between studies and jobs, and tells who the neighbours are.
"""

import fcntl
import os
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tinyllm_ray.errors import ConfigError

_GPU_BYTES = 1 << 20
"""Where a GPU's byte lies in the file; the cores' come first."""
_FLOCK = "hhqqi"
"""Linux's struct flock on 64 bits: type, whence, start, length, process."""


@dataclass
class Claims:
    """What trials of this user hold on this machine, cores and GPUs; one object a process.

    The locks are POSIX record locks, so this process must not open the file a second time.
    """

    path: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / f"tinyllm_ray-cores-{os.getuid()}")

    def __post_init__(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_uid != os.getuid():
            os.close(self._file)
            raise ConfigError(f"{self.path} belongs to another user; set TMPDIR to a folder of yours")

    def take_cores(self, cores: Iterable[int], most: int) -> list[int]:
        """Claim the first of `cores` that nobody has, at most so many."""
        taken: list[int] = []
        for core in cores:
            if len(taken) == most:
                break
            if self._lock(core):
                taken.append(core)
        return taken

    def take_gpu(self, address: str) -> bool:
        """Claim a GPU; False where another trial has it."""
        return self._lock(_gpu_byte(address))

    def holder(self, address: str) -> int | None:
        """The other process that has claimed a GPU; None where none has."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _gpu_byte(address), 1, 0)
        kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else process

    def close(self) -> None:
        """Give everything back; the process's end does the same."""
        os.close(self._file)

    def _lock(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        return True


def _gpu_byte(address: str) -> int:
    digits = "".join(letter for letter in address if letter.isalnum())
    return _GPU_BYTES + int(digits, 16)
