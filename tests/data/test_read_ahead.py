"""Reading ahead ends when it is told to, whoever waits for it, and closes where its ranges come from."""

import threading

import pytest

from tinyllm_ray.data import read_ahead
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.data.ranges import FileRanges
from tinyllm_ray.data.read_ahead import ReadAhead
from tinyllm_ray.data.rows import row_ranges, visits


class ClosingSource(FileRanges):
    """Tells of its closing, and by whom it was closed."""

    def __init__(self, cache):
        super().__init__(cache)
        self.closed, self.thread = threading.Event(), None

    def close(self):
        super().close()
        self.thread = threading.current_thread().name
        self.closed.set()


class Clock:
    """Tells that somebody is about to wait."""

    def __init__(self):
        self.read = threading.Event()

    def perf_counter(self):
        self.read.set()
        return 0.0


def test_who_waits_in_another_thread_is_woken_by_the_end(counting_cache, monkeypatch):
    clock, go_on, raised = Clock(), threading.Event(), []
    monkeypatch.setattr(read_ahead, "time", clock)

    def gated():
        go_on.wait()
        yield from visits(row_ranges([100] * 10, 10, 2), 1, 0)

    source = ClosingSource(counting_cache)
    reader = ReadAhead(source, "train", 10, 1, gated(), depth=1)

    def wait():
        try:
            reader.next()
        except ValueError as error:
            raised.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    clock.read.wait()
    reader.close()
    go_on.set()
    waiting.join()
    assert raised == ["the reader is closed"]
    assert source.closed.wait(60)


@pytest.mark.parametrize("rows", [0, 5, 95])
def test_the_reader_closes_its_source(counting_cache, rows):
    source = ClosingSource(counting_cache)
    with RowLoader(counting_cache, context=10, seed=1, ranges=source) as loader:
        loader.next(rows)
        assert not source.closed.is_set()
    assert source.closed.wait(60)
    assert source.thread == "read-ahead"


def test_activations_are_told(counting_cache):
    told = []
    with RowLoader(counting_cache, context=10, seed=1, on_activation=told.append) as loader:
        for _ in range(6):
            loader.next(20)
    assert [activation.visit.start for activation in told] == [0, 20, 40, 60, 80, 100]
    assert [activation.visit.pass_number for activation in told] == [0] * 5 + [1]
    assert all(activation.seconds >= 0 for activation in told)
