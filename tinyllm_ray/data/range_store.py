"""Ranges in anonymous shared memory: each read once, however many ask, within a limit of bytes."""

import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

Fill = Callable[[npt.NDArray[np.uint8]], None]

MEMORY_NAME = "tinyllm_ray-range"
"""How the memory shows in /proc/PID/maps, after `memfd:`."""


class RangeMemory:
    """An anonymous file in memory that nobody can change any more; closed with the last reference to this object."""

    def __init__(self, size: int, fill: Fill) -> None:
        self.descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size)
        memory = mmap.mmap(self.descriptor, size)
        fill(np.frombuffer(memory, np.uint8))
        memory.close()  # sealing needs every writable mapping gone
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)


class RangeStore:
    """The ranges held, the least recently asked for first to go; safe for many threads.

    Ranges are read beside each other, each in a thread of its own; one that has no room yet waits for those being read.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        """Ranges held or being read; never above the limit."""
        self.reads = 0
        self._changed = threading.Condition()
        self._entries: OrderedDict[Hashable, tuple[Future[RangeMemory | str], int]] = OrderedDict()
        self._closed = False

    def get(self, key: Hashable, size: int, fill: Fill) -> "Future[RangeMemory | str]":
        """The range of `size` bytes under `key`, or what went wrong in reading it; `fill` writes it where it is new.

        Raises ValueError where it is larger than the limit.
        """
        if not 0 < size <= self.limit_bytes:
            raise ValueError(f"a range of {size:,} bytes does not fit into the server's {self.limit_bytes:,} bytes")
        with self._changed:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
            future: Future[RangeMemory | str] = Future()
            self._entries[key] = (future, 0)
        threading.Thread(target=self._read, args=(key, size, fill, future), name="range-read", daemon=True).start()
        return future

    def close(self) -> None:
        """Let go of everything; a read that goes on ends for nobody."""
        with self._changed:
            self._closed = True
            self._entries.clear()
            self.held_bytes = 0
            self._changed.notify_all()

    def _read(self, key: Hashable, size: int, fill: Fill, future: "Future[RangeMemory | str]") -> None:
        if not self._make_room(key, size):
            future.set_result("the server was closed")
            return
        found: RangeMemory | str
        try:
            found = RangeMemory(size, fill)
        except Exception as error:  # as text: a traceback would keep the half-filled memory mapped
            log.warning("%s", error)
            found = str(error)
        with self._changed:
            if not self._closed and isinstance(found, str):
                del self._entries[key]
                self.held_bytes -= size
            future.set_result(found)
            self._changed.notify_all()

    def _make_room(self, key: Hashable, size: int) -> bool:
        """Wait until `size` bytes are free and take them; False once the store is closed."""
        with self._changed:
            while not self._closed:
                self._let_go(self.held_bytes + size - self.limit_bytes)
                if self.held_bytes + size <= self.limit_bytes:
                    self.held_bytes += size
                    self.reads += 1
                    self._entries[key] = (self._entries[key][0], size)
                    return True
                self._changed.wait()
            return False

    def _let_go(self, excess: int) -> None:
        """Drop the ranges least recently asked for until `excess` bytes are free, as far as they are read."""
        ready: list[tuple[Any, int]] = [(key, size) for key, (future, size) in self._entries.items() if future.done()]
        for key, size in ready:
            if excess <= 0:
                return
            del self._entries[key]
            self.held_bytes -= size
            excess -= size
