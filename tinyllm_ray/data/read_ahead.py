"""Reads ranges of a cache ahead of their use, in one background thread, a fixed number of them at a time."""

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tinyllm_ray.data.cache import Tokens
from tinyllm_ray.data.ranges import RangeSource
from tinyllm_ray.data.rows import Indices, Visit, row_order


@dataclass(frozen=True)
class LoadedRange:
    """A range in memory."""

    visit: Visit
    rows: Tokens
    """[rows, context + 1], a view of the tokens in which neighbours share a token."""
    order: Indices
    tokens: Tokens
    """As the source lent them."""


@dataclass(frozen=True)
class Activation:
    """A range's coming into use."""

    visit: Visit
    ready: bool
    """Whether it had been read by then."""
    seconds: float


OnActivation = Callable[[Activation], None]


class ReadAhead:
    """Ranges in the order of their visits, at most `depth` of them read while one is in use.

    The thread only moves work earlier in time: which range comes next, and how its rows are ordered, is decided by
    the visits. What goes wrong in it is raised by `next`, at the turn of the range concerned.
    """

    def __init__(
        self,
        source: RangeSource,
        split: str,
        context: int,
        seed: int,
        visits: Iterator[Visit],
        depth: int,
        on_activation: OnActivation | None = None,
    ) -> None:
        self.wait_seconds = 0.0
        """Time that `next` spent waiting for a range."""
        self._on_activation = on_activation
        self._in_use: Tokens | None = None
        self._failure: BaseException | None = None
        self._ready: queue.SimpleQueue[LoadedRange | BaseException] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[Tokens | None] = queue.SimpleQueue()
        """One entry for each range that may be read: the tokens to give back before it, None where there are none."""
        for _ in range(depth + 1):  # one more for the range in use
            self._turns.put(None)
        load = functools.partial(_load, source, split, context, seed)
        stop = threading.Event()
        # The thread knows the queues and not this object, so that a reader forgotten without close() ends as well.
        self._close = weakref.finalize(self, _close, stop, self._turns)
        threading.Thread(
            target=_run, args=(visits, source, load, self._turns, self._ready, stop), name="read-ahead", daemon=True
        ).start()

    def next(self) -> LoadedRange:
        """The next range; the one before is given back and must not be read any more."""
        if not self._close.alive:
            raise _closed()
        if self._failure is not None:
            raise self._failure
        if self._in_use is not None:
            self._turns.put(self._in_use)
            self._in_use = None
        began, ready = time.perf_counter(), not self._ready.empty()
        item = self._ready.get()
        seconds = time.perf_counter() - began
        self.wait_seconds += seconds
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        self._in_use = item.tokens
        if self._on_activation is not None:
            self._on_activation(Activation(item.visit, ready, seconds))
        return item

    def close(self) -> None:
        """Let the thread end after the read it is in; returns at once. A `next` that waits for it then raises."""
        self._close()


def _load(source: RangeSource, split: str, context: int, seed: int, visit: Visit) -> LoadedRange:
    start = visit.range.first_row * context
    tokens = source.load(split, start, start + visit.range.rows * context + 1)
    rows: Tokens = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context]
    return LoadedRange(visit, rows, row_order(visit, seed), tokens)


def _run(
    visits: Iterator[Visit],
    source: RangeSource,
    load: Callable[[Visit], LoadedRange],
    turns: "queue.SimpleQueue[Tokens | None]",
    ready: "queue.SimpleQueue[LoadedRange | BaseException]",
    stop: threading.Event,
) -> None:
    try:
        for visit in visits:
            used = turns.get()
            if stop.is_set():
                return
            if used is not None:
                # Here, as unmapping 128 MiB takes milliseconds.
                source.release(used)
                used = None
            ready.put(load(visit))
    except BaseException as error:
        ready.put(error)  # raised again where the range is asked for; here nobody would see it
    finally:
        ready.put(_closed())  # for whoever waits in another thread than the one that closed
        source.close()


def _closed() -> ValueError:
    return ValueError("the reader is closed")


def _close(stop: threading.Event, turns: "queue.SimpleQueue[Tokens | None]") -> None:
    stop.set()
    turns.put(None)
