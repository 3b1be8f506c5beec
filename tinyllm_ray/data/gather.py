"""Batches gathered ahead of their use, in one background thread, into host buffers that take turns."""

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from tinyllm_ray.data.cache import Tokens
from tinyllm_ray.data.loader import Loader


class Gathered(NamedTuple):
    """A batch that lies in a host buffer."""

    buffer: int
    """Number of the buffer."""
    position: int
    """The loader's row cursor after it."""


class GatherAhead:
    """A loader's batches in their order, as many of them ahead as there are `buffers` that are not in use.

    The thread calls nothing of CUDA, so that it disturbs no graph capture. What goes wrong in it is raised by `next`,
    at the turn of the batch concerned, again and again. The loader is the thread's alone from here on.
    """

    def __init__(self, loader: Loader, buffers: Sequence[Tokens]) -> None:
        self.wait_seconds = 0.0
        """Time that `next` spent waiting for a batch."""
        self._failure: BaseException | None = None
        self._ready: queue.SimpleQueue[Gathered | BaseException] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(buffers)):
            self._free.put(number)
        stop = threading.Event()
        # The thread does not know this object, so that one forgotten without close() ends as well.
        self._close = weakref.finalize(self, _close, stop, self._free, loader)
        threading.Thread(
            target=_run, args=(loader, buffers, self._free, self._ready, stop), name="gather-ahead", daemon=True
        ).start()

    @property
    def ready(self) -> bool:
        """Whether `next` would not wait."""
        return not self._ready.empty()

    def next(self) -> Gathered:
        """The next batch; its buffer is not written to until it is given back."""
        if not self._close.alive:
            raise _closed()
        if self._failure is not None:
            raise self._failure
        began = time.perf_counter()
        item = self._ready.get()
        self.wait_seconds += time.perf_counter() - began
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        return item

    def give_back(self, buffer: int) -> None:
        self._free.put(buffer)

    def close(self) -> None:
        """Close the loader and let the thread end; returns at once."""
        self._close()


def _run(
    loader: Loader,
    buffers: Sequence[Tokens],
    free: "queue.SimpleQueue[int]",
    ready: "queue.SimpleQueue[Gathered | BaseException]",
    stop: threading.Event,
) -> None:
    try:
        while True:
            number = free.get()
            if stop.is_set():
                raise _closed()
            loader.next_into(buffers[number])
            ready.put(Gathered(number, loader.position))
    except BaseException as error:
        ready.put(error)  # raised again where the batch is asked for; here nobody would see it


def _closed() -> ValueError:
    return ValueError("the feed is closed")


def _close(stop: threading.Event, free: "queue.SimpleQueue[int]", loader: Loader) -> None:
    stop.set()
    free.put(-1)
    loader.close()
