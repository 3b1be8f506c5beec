"""Feeds: batches arrive on the device as the loader made them, whatever the device is still busy with."""

import numpy as np
import pytest
import torch
from slow_source import SlowSource

from tinyllm_ray.data import read_ahead
from tinyllm_ray.data.feed import SyntheticFeed, device_feed, widen
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.errors import ConfigError

CPU = torch.device("cpu")


def gpu(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


def loader_of(cache, **options):
    return RowLoader(cache, context=10, seed=1, **options)


DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"),
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_batches_are_the_loaders(counting_cache, device):
    with loader_of(counting_cache) as loader:
        feed = device_feed(loader_of(counting_cache), 7, device)
        batches = [feed.next() for _ in range(40)]
        for number, batch in enumerate(batches):
            assert batch.device.type == device.type
            assert batch.dtype == torch.uint16
            assert (batch.cpu().numpy() == loader.next(7)).all(), number
        assert feed.position == loader.position == 280
        feed.close()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_position_is_that_of_the_batch_in_hand(counting_cache, device):
    feed = device_feed(loader_of(counting_cache, start_row=5), 7, device)
    assert feed.position == 5
    feed.next()
    assert feed.position == 12
    resumed = device_feed(loader_of(counting_cache, start_row=feed.position), 7, device)
    assert (feed.next().cpu().numpy() == resumed.next().cpu().numpy()).all()
    feed.close()
    resumed.close()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_failure_comes_with_the_batch_it_belongs_to(make_cache, device):
    cache = make_cache(range(1005))
    (cache.folder / "train-00009.bin").unlink()
    with loader_of(cache, shards_per_range=3) as loader:
        feed = device_feed(loader_of(cache, shards_per_range=3), 1, device)
        while True:
            try:
                expected = loader.next(1)
            except ConfigError:
                break
            assert (feed.next().cpu().numpy() == expected).all()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"train-00009.bin"):
            feed.next()
    feed.close()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_ids_widen_without_a_sign(device):
    for dtype in (np.uint16, np.uint32):
        highest = np.iinfo(dtype).max
        batch = torch.from_numpy(np.array([[0, 1, highest // 2 + 1, highest]], dtype)).to(device)
        assert widen(batch).dtype == torch.int64
        assert widen(batch).tolist() == [[0, 1, highest // 2 + 1, highest]]


def test_a_batch_larger_than_a_pass_is_refused_at_once(counting_cache):
    with loader_of(counting_cache) as loader, pytest.raises(ConfigError, match="101 rows is more than the 100 rows"):
        device_feed(loader, 101, CPU)


def test_a_slow_file_system_shows_as_waiting(counting_cache, monkeypatch):
    """Each range of 20 rows takes three seconds of a clock that stands still otherwise."""
    source = SlowSource(counting_cache)
    monkeypatch.setattr(read_ahead, "time", source)
    feed = device_feed(loader_of(counting_cache, ranges=source, read_ahead=0), 10, CPU)
    assert feed.wait_seconds == 0
    for ranges in (1, 2, 3):
        feed.next()
        assert feed.wait_seconds == 3 * ranges
        feed.next()
        assert feed.wait_seconds == 3 * ranges
    feed.close()
    source.asked.set()


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, torch.uint16), (2**16 + 1, torch.uint32)])
def test_a_synthetic_batch_stays_where_it_is(device, vocab_size, dtype):
    feed = SyntheticFeed(4, 10, vocab_size, device, seed=3)
    batch = feed.next()
    assert batch.shape == (4, 11)
    assert (batch.dtype, batch.device.type) == (dtype, device.type)
    assert widen(batch).max() < vocab_size
    assert feed.next() is batch
    same = SyntheticFeed(4, 10, vocab_size, CPU, seed=3).next()
    assert (batch.cpu().numpy() == same.numpy()).all()
    assert (SyntheticFeed(4, 10, vocab_size, CPU, seed=4).next().numpy() != same.numpy()).any()
    assert (feed.position, feed.wait_seconds) == (0, 0.0)
    feed.close()


@gpu
def test_a_busy_device_reads_what_it_was_given(counting_cache):
    """Kernels run long after the host has moved on: neither host nor device memory may be used again too early."""
    device = torch.device("cuda")
    feed = device_feed(loader_of(counting_cache), 50, device)
    sums = []
    for _ in range(30):
        batch = feed.next()
        torch.cuda._sleep(20_000_000)  # about 10 ms on the consumer's stream
        sums.append(widen(batch).sum(1))
        del batch
    with loader_of(counting_cache) as loader:
        for number, found in enumerate(sums):
            assert found.tolist() == loader.next(50).astype(np.int64).sum(1).tolist(), number
    feed.close()


@gpu
def test_the_copy_is_ahead_and_on_a_stream_of_its_own(counting_cache):
    feed = device_feed(loader_of(counting_cache), 50, torch.device("cuda"))
    while feed._ahead is None:  # the first batches may come faster than they are gathered
        feed.next()
    assert feed._hosts[0].is_pinned()
    assert feed._stream != torch.cuda.current_stream()
    feed.close()
