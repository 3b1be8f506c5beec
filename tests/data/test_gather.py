"""Gathering ahead: the loader's batches in their order, in buffers that nobody else writes to meanwhile."""

import gc
import threading

import numpy as np
import pytest
from slow_source import SlowSource

from tinyllm_ray.data import gather as gather_module
from tinyllm_ray.data.gather import GatherAhead
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.data.ranges import FileRanges
from tinyllm_ray.errors import ConfigError


@pytest.fixture
def buffers():
    return [np.zeros((7, 11), np.uint16) for _ in range(3)]


def loader_of(cache, **options):
    return RowLoader(cache, context=10, seed=1, **options)


def gather_threads():
    return {thread for thread in threading.enumerate() if thread.name in {"gather-ahead", "read-ahead"}}


class GatedSource(FileRanges):
    """Reads a range for each permit."""

    def __init__(self, cache):
        super().__init__(cache)
        self.reading, self.permits = threading.Event(), threading.Semaphore(0)

    def load(self, split, start, stop):
        self.reading.set()
        self.permits.acquire()
        return super().load(split, start, stop)


def test_batches_are_the_loaders_and_so_is_the_position(counting_cache, buffers):
    gather = GatherAhead(loader_of(counting_cache, start_row=5), buffers)
    with loader_of(counting_cache, start_row=5) as loader:
        for _ in range(50):
            found = gather.next()
            assert (buffers[found.buffer] == loader.next(7)).all()
            assert found.position == loader.position
            gather.give_back(found.buffer)
    gather.close()


def test_a_buffer_is_left_alone_until_it_is_given_back(counting_cache, buffers):
    gather = GatherAhead(loader_of(counting_cache), buffers)
    lent = [gather.next() for _ in buffers]
    assert {found.buffer for found in lent} == {0, 1, 2}
    with loader_of(counting_cache) as loader:
        expected = [loader.next(7) for _ in range(5)]
    gather.give_back(lent[1].buffer)
    assert gather.next().buffer == lent[1].buffer
    assert not gather.ready  # there is no buffer left to fill
    for index, batch in ((0, expected[0]), (1, expected[3]), (2, expected[2])):
        assert (buffers[lent[index].buffer] == batch).all()
    gather.close()


def test_a_failure_comes_at_its_turn_and_stays(make_cache, buffers):
    cache = make_cache(range(1005))
    (cache.folder / "train-00000.bin").unlink()
    gather, good = GatherAhead(loader_of(cache, shards_per_range=3), buffers), 0
    with loader_of(cache, shards_per_range=3) as loader:
        while True:
            try:
                expected = loader.next(7)
            except ConfigError:
                break
            found = gather.next()
            assert (buffers[found.buffer] == expected).all()
            gather.give_back(found.buffer)
            good += 1
    assert good > 0
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"train-00000.bin") as raised:
            gather.next()
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    gather.close()


def test_closing_wakes_who_waits_and_waits_for_nobody(counting_cache, buffers):
    before, source, raised = gather_threads(), GatedSource(counting_cache), []
    gather = GatherAhead(loader_of(counting_cache, ranges=source), buffers)

    def consume():
        try:
            gather.next()
        except ValueError as error:
            raised.append(str(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    source.reading.wait()
    gather.close()
    gather.close()
    with pytest.raises(ValueError, match="closed"):
        gather.next()
    source.permits.release(100)  # the read that goes on ends
    consumer.join()
    assert raised in ([], ["the reader is closed"], ["the feed is closed"])  # or it got the batch after all
    for thread in gather_threads() - before:
        thread.join()


def test_one_that_is_forgotten_ends_with_its_loader(counting_cache, buffers):
    before = gather_threads()
    gather = GatherAhead(loader_of(counting_cache), buffers)
    gather.next()
    mine = gather_threads() - before
    assert len(mine) == 2
    del gather
    gc.collect()
    for thread in mine:
        thread.join()


def test_a_slow_file_system_shows_as_waiting(counting_cache, monkeypatch):
    source = SlowSource(counting_cache)
    monkeypatch.setattr(gather_module, "time", source)
    loader = loader_of(counting_cache, ranges=source, read_ahead=0)
    gather = GatherAhead(loader, [np.zeros((20, 11), np.uint16)])  # a range a batch
    for ranges in (1, 2, 3):
        found = gather.next()
        assert gather.wait_seconds == 3 * ranges
        gather.give_back(found.buffer)
    gather.close()
    source.asked.set()
