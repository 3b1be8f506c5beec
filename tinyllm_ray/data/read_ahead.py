"""Reads ranges of a cache ahead of their use, in one background thread and a fixed number of buffers."""

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tinyllm_ray.data.cache import TokenCache, Tokens
from tinyllm_ray.data.rows import Indices, Visit, row_order


@dataclass(frozen=True)
class LoadedRange:
    """A range in memory."""

    visit: Visit
    rows: Tokens
    """[rows, context + 1], a view of the buffer in which neighbours share a token."""
    order: Indices
    buffer: Tokens


class ReadAhead:
    """Ranges in the order of their visits, at most `depth` of them read while one is in use.

    The thread only moves work earlier in time: which range comes next, and how its rows are ordered, is decided by
    the visits. What goes wrong in it is raised by `next`, at the turn of the range concerned.
    """

    def __init__(
        self, cache: TokenCache, split: str, context: int, seed: int, visits: Iterator[Visit], rows: int, depth: int
    ) -> None:
        self.wait_seconds = 0.0
        """Time that `next` spent waiting for a range."""
        self._current: LoadedRange | None = None
        self._failure: BaseException | None = None
        self._ready: queue.SimpleQueue[LoadedRange | BaseException] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[Tokens | None] = queue.SimpleQueue()
        for _ in range(depth + 1):  # one more for the range in use
            self._free.put(np.empty(rows * context + 1, cache.dtype))
        load = functools.partial(_load, cache, split, context, seed)
        stop = threading.Event()
        # The thread knows the queues and not this object, so that a reader forgotten without close() ends as well.
        self._close = weakref.finalize(self, _close, stop, self._free)
        threading.Thread(
            target=_run, args=(visits, load, self._free, self._ready, stop), name="read-ahead", daemon=True
        ).start()

    def next(self) -> LoadedRange:
        """The next range; the one before is given back and must not be read any more."""
        if not self._close.alive:
            raise ValueError("the reader is closed")
        if self._failure is not None:
            raise self._failure
        if self._current is not None:
            self._free.put(self._current.buffer)
            self._current = None
        began = time.perf_counter()
        item = self._ready.get()
        self.wait_seconds += time.perf_counter() - began
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        self._current = item
        return item

    def close(self) -> None:
        """Let the thread end after the read it is in; returns at once."""
        self._close()


def _load(cache: TokenCache, split: str, context: int, seed: int, visit: Visit, buffer: Tokens) -> LoadedRange:
    tokens = buffer[: visit.range.rows * context + 1]
    cache.read_into(split, visit.range.first_row * context, tokens)
    rows: Tokens = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context]
    return LoadedRange(visit, rows, row_order(visit, seed), buffer)


def _run(
    visits: Iterator[Visit],
    load: Callable[[Visit, Tokens], LoadedRange],
    free: "queue.SimpleQueue[Tokens | None]",
    ready: "queue.SimpleQueue[LoadedRange | BaseException]",
    stop: threading.Event,
) -> None:
    try:
        for visit in visits:
            buffer = free.get()
            if buffer is None or stop.is_set():
                return
            ready.put(load(visit, buffer))
    except BaseException as error:
        ready.put(error)  # raised again where the range is asked for; here nobody would see it


def _close(stop: threading.Event, free: "queue.SimpleQueue[Tokens | None]") -> None:
    stop.set()
    free.put(None)
