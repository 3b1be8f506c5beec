"""The loader: rows are exact across borders, dealt without overlap, resumable, and never waited for in vain."""

import gc
import logging
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.loader import RowLoader, subset_batches, validation_batches
from tinyllm_ray.errors import ConfigError

ROWS = 100  # of the counting cache at context 10


def row_numbers(batch, context=10):
    """Which rows of a counting cache a batch holds, their tokens checked."""
    first = batch[:, :1].astype(np.int64)
    assert (batch == first + np.arange(context + 1)).all()
    assert (first % context == 0).all()
    return (first[:, 0] // context).tolist()


def take(cache, count, batch=10, **options):
    with RowLoader(cache, context=10, seed=1, **options) as loader:
        return [row for _ in range(count // batch) for row in row_numbers(loader.next(batch))]


class PrefixCache(TokenCache):
    """The first tokens of a cache."""

    def __init__(self, cache, tokens):
        super().__init__(cache.folder, cache.manifest)
        self._count = tokens

    def tokens(self, split):
        return self._count


class WatchedCache(TokenCache):
    """Calls `before` with the number of each read."""

    def __init__(self, cache, before):
        super().__init__(cache.folder, cache.manifest)
        self.before, self.reads = before, 0

    def read_into(self, split, start, out):
        self.reads += 1
        self.before(self.reads)
        super().read_into(split, start, out)


def test_a_pass_has_every_row_once_and_the_next_another_order(counting_cache, caplog):
    caplog.set_level(logging.INFO)
    with RowLoader(counting_cache, context=10, seed=1) as loader:
        assert loader.rows_per_pass == ROWS
        first = row_numbers(loader.next(ROWS))
        assert (loader.position, loader.passes) == (ROWS, 1)
        assert "pass 2" not in caplog.text
        second = row_numbers(loader.next(ROWS))
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    assert first != sorted(first)
    assert caplog.text.count("pass 2 over train") == 1
    assert "pass 3" not in caplog.text


@settings(max_examples=40)
@given(
    shards_per_range=st.integers(1, 12),
    read_ahead=st.integers(0, 3),
    of=st.integers(1, 4),
    batch=st.integers(1, 25),
    start=st.integers(0, 250),
)
def test_workers_share_the_order_without_overlap(counting_cache, shards_per_range, read_ahead, of, batch, start):
    whole = take(counting_cache, start + 250, batch=1, shards_per_range=shards_per_range)[start:]
    dealt = {}
    for worker in range(of):
        options = {"shards_per_range": shards_per_range, "read_ahead": read_ahead, "worker": worker, "of": of}
        with RowLoader(counting_cache, context=10, seed=1, start_row=start, **options) as loader:
            mine = [row for _ in range(250 // batch // of) for row in row_numbers(loader.next(batch))]
            assert loader.position == start + len(mine) * of
        dealt |= {worker + of * place: row for place, row in enumerate(mine)}
    assert [dealt[place] for place in sorted(dealt)] == whole[: len(dealt)]


def test_the_seed_decides(counting_cache):
    with (
        RowLoader(counting_cache, context=10, seed=1) as one,
        RowLoader(counting_cache, context=10, seed=1) as same,
        RowLoader(counting_cache, context=10, seed=2) as other,
    ):
        rows = one.next(50)
        assert (rows == same.next(50)).all()
        assert (rows != other.next(50)).any()


@pytest.mark.parametrize("read_ahead", [0, 1, 3])
def test_the_order_does_not_depend_on_timing(counting_cache, read_ahead):
    expected = take(counting_cache, 3 * ROWS)
    asked, permits = threading.Event(), threading.Semaphore(0)
    slow = WatchedCache(counting_cache, lambda number: permits.acquire())
    found = []

    def consume():
        with RowLoader(slow, context=10, seed=1, read_ahead=read_ahead) as loader:
            asked.set()
            found.extend(row for _ in range(30) for row in row_numbers(loader.next(10)))
            assert loader.wait_seconds > 0

    consumer = threading.Thread(target=consume)
    consumer.start()
    asked.wait()  # no range is read before the consumer is there
    permits.release(100)
    consumer.join()
    assert found == expected


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_more_is_read_ahead_than_asked(counting_cache, depth):
    reached = threading.Event()
    watched = WatchedCache(counting_cache, lambda number: reached.set() if number == 1 + depth else None)
    with RowLoader(watched, context=10, seed=1, read_ahead=depth) as loader:
        loader.next(20)  # one range
        assert reached.wait(60)
        loader.next_into(np.empty((0, 11), np.uint16))
        assert watched.reads == 1 + depth


def test_rows_come_into_memory_that_is_there(counting_cache):
    batch = torch.zeros((20, 11), dtype=torch.uint16)
    with RowLoader(counting_cache, context=10, seed=1) as loader:
        loader.next_into(batch.numpy())
    assert row_numbers(batch.numpy()) == take(counting_cache, 20)


def test_wide_ids(make_cache):
    cache = make_cache(range(100_000, 101_005), vocab_size=128_256)
    with RowLoader(cache, context=10, seed=1) as loader:
        batch = loader.next(ROWS)
    assert batch.dtype == np.uint32
    assert sorted(row_numbers(batch - 100_000)) == list(range(ROWS))


def damage_last_shard(folder, how):
    path = folder / "train-00009.bin"  # 00010 holds five tokens, 00009 begins a range
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        path.write_bytes(b"\xff\xff" * 100)


@pytest.mark.parametrize(
    ("how", "said"), [("missing", "No such file"), ("short", "180 bytes, 200 expected"), ("wild", "id 65535")]
)
def test_a_damaged_shard_is_named_at_its_turn(make_cache, how, said):
    cache = make_cache(range(1005), vocab_size=2**15)
    intact = take(cache, ROWS, batch=1, shards_per_range=3)
    damage_last_shard(cache.folder, how)
    with RowLoader(cache, context=10, seed=1, shards_per_range=3) as loader:
        good = [row < 90 for row in intact].index(False)
        assert [row for _ in range(good) for row in row_numbers(loader.next(1))] == intact[:good]
        for _ in range(2):  # and again: a loader that failed never goes on as if nothing were
            with pytest.raises(ConfigError, match=said) as raised:
                loader.next(1)
            assert str(cache.folder / "train-00009.bin") in str(raised.value)
        assert (raised.value.__cause__ is not None) == (how == "missing")


def test_any_failure_of_the_reader_reaches_the_consumer(counting_cache):
    def fail(number):
        if number == 3:
            raise RuntimeError("the disk went away") from OSError("cause")

    with RowLoader(WatchedCache(counting_cache, fail), context=10, seed=1) as loader:
        loader.next(20)
        loader.next(15)
        with pytest.raises(RuntimeError, match="went away") as raised:
            loader.next(15)
        with pytest.raises(RuntimeError, match="went away"):
            loader.next(5)  # the range before holds as many, but its buffer was given back
        assert loader.position == 35
    assert isinstance(raised.value.__cause__, OSError)


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_close_does_not_wait_for_a_read(counting_cache):
    before = reader_threads()
    reading, free = threading.Event(), threading.Event()

    def block(number):
        reading.set()
        free.wait()

    loader = RowLoader(WatchedCache(counting_cache, block), context=10, seed=1)
    (thread,) = set(reader_threads()) - set(before)
    reading.wait()
    loader.close()
    loader.close()
    assert thread.is_alive()
    with pytest.raises(ValueError, match="closed"):
        loader.next(1)
    free.set()
    thread.join()


def test_a_loader_that_is_forgotten_ends(counting_cache):
    before = reader_threads()
    loader = RowLoader(counting_cache, context=10, seed=1)
    (thread,) = set(reader_threads()) - set(before)
    loader.next(5)
    del loader
    gc.collect()
    thread.join()


def test_too_few_rows_are_refused(counting_cache):
    with RowLoader(counting_cache, context=10, seed=1, of=2) as loader:
        with pytest.raises(ConfigError, match=r"102 rows is more than the 100 rows .* training.tokens_per_update"):
            loader.next(51)
        assert len(loader.next(50)) == 50
    with pytest.raises(ConfigError, match=r"1,005 tokens make no row of 1005 \+ 1.* model.context"):
        RowLoader(counting_cache, context=1005, seed=1)
    with pytest.raises(ConfigError, match="no split 'test'; it has train, validation"):
        RowLoader(counting_cache, "test", context=10, seed=1)


@settings(max_examples=60)
@given(tokens=st.integers(2, 1005), context=st.integers(1, 40), rows=st.integers(1, 9))
def test_validation_has_every_target_once(counting_cache, tokens, context, rows):
    cache = PrefixCache(counting_cache, tokens)
    targets = []
    batches = list(validation_batches(cache, context, rows, split="train"))
    for batch in batches:
        assert 0 < len(batch) <= rows
        assert 1 < batch.shape[1] <= context + 1
        assert (np.diff(batch.astype(int), axis=1) == 1).all()
        targets += batch[:, 1:].ravel().tolist()
    assert targets == list(range(1, tokens))
    assert all(batch.shape == (rows, context + 1) for batch in batches[:-2])


def test_a_split_without_a_target_is_refused(make_cache):
    with pytest.raises(ConfigError, match="1 tokens hold nothing to predict"):
        next(validation_batches(make_cache([1], validation=[5]), 4, 2))


def test_the_subset_is_fixed_and_ascending(counting_cache):
    options = {"context": 10, "rows": 4, "blocks": 10, "split": "train"}
    batches = list(subset_batches(counting_cache, seed=12345, **options))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    rows = [row for batch in batches for row in row_numbers(batch)]
    assert rows == sorted(set(rows))
    again = [row for batch in subset_batches(counting_cache, seed=12345, **options) for row in row_numbers(batch)]
    other = [row for batch in subset_batches(counting_cache, seed=1, **options) for row in row_numbers(batch)]
    assert rows == again != other
    everything = subset_batches(counting_cache, context=10, rows=64, blocks=1024, seed=0, split="train")
    assert [row for batch in everything for row in row_numbers(batch)] == list(range(ROWS))
    with pytest.raises(ConfigError, match="make no row"):
        next(subset_batches(counting_cache, context=10, rows=4, blocks=10, seed=0))
