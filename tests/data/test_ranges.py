"""The contract of range sources, held by the files' and the range server's alike."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.data.range_server import RangeServer, server_address, supported
from tinyllm_ray.data.ranges import FileRanges, RangeSource
from tinyllm_ray.data.served_ranges import ServedRanges, open_ranges
from tinyllm_ray.errors import ConfigError

MakeSource = Callable[[TokenCache], RangeSource]

needs_server = pytest.mark.skipif(not supported(), reason="needs Linux's anonymous shared memory")


@pytest.fixture(params=["files", pytest.param("server", marks=needs_server)])
def make_source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeSource]:
    if request.param == "files":
        yield FileRanges
        return
    address = server_address(str(tmp_path), "node")
    server = RangeServer(address)
    yield lambda cache: ServedRanges(cache, address)
    server.close()


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 100), (50, 250), (99, 101), (1000, 1005), (0, 1005)])
def test_tokens_are_those_of_the_cache(make_source, counting_cache, start, stop):
    tokens = make_source(counting_cache).load("train", start, stop)
    assert tokens.dtype == counting_cache.dtype
    assert tokens.tolist() == list(range(start, stop))


def test_wide_ids(make_source, make_cache):
    cache = make_cache(range(100_000, 100_300), vocab_size=128_256)
    assert make_source(cache).load("train", 150, 300).tolist() == list(range(100_150, 100_300))


def test_nobody_can_write_to_a_range(make_source, counting_cache):
    tokens = make_source(counting_cache).load("train", 0, 100)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_a_range_stays_what_it_is_until_it_is_given_back(make_source, counting_cache):
    source = make_source(counting_cache)
    spans = list(itertools.pairwise(range(0, 1005, 70)))
    lent = [source.load("train", *span) for span in spans]
    for span, tokens in zip(spans, lent, strict=True):
        assert tokens.tolist() == list(range(*span))
    for tokens in lent[::2]:
        source.release(tokens)
    more = [source.load("train", start, start + 65) for start in range(900)]
    for span, tokens in list(zip(spans, lent, strict=True))[1::2]:
        assert tokens.tolist() == list(range(*span))
    assert [tokens[0] for tokens in more] == list(range(900))
    source.close()
    assert more[7].tolist() == list(range(7, 72))


@pytest.mark.parametrize(
    ("damage", "said", "cause"),
    [
        (lambda path: path.unlink(), "No such file", FileNotFoundError),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "180 bytes, 200 expected", type(None)),
        (lambda path: path.write_bytes(b"\xff\xff" * 100), "id 65535", type(None)),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read", IsADirectoryError),
    ],
    ids=["missing", "short", "wild", "unreadable"],
)
def test_a_damaged_shard_is_named_and_the_others_still_come(make_source, make_cache, damage, said, cause):
    cache = make_cache(range(1005), vocab_size=2**15)
    source = make_source(cache)
    path = cache.folder / "train-00003.bin"
    damage(path)
    for _ in range(2):
        with pytest.raises(ConfigError, match=said) as raised:
            source.load("train", 250, 450)
        assert str(path) in str(raised.value)
        assert isinstance(raised.value.__cause__, cause)
    assert source.load("train", 400, 500).tolist() == list(range(400, 500))


def test_a_shard_that_is_repaired_is_read_again(make_source, make_cache):
    cache = make_cache(range(1005))
    source, path = make_source(cache), cache.folder / "train-00003.bin"
    intact = path.read_bytes()
    path.unlink()
    with pytest.raises(ConfigError):
        source.load("train", 300, 400)
    path.write_bytes(intact)
    assert source.load("train", 300, 400).tolist() == list(range(300, 400))


@pytest.mark.parametrize("read_ahead", [0, 1, 3])
def test_the_order_of_rows_is_not_the_sources(make_source, counting_cache, read_ahead):
    options = {"context": 10, "seed": 3, "read_ahead": read_ahead}
    with (
        RowLoader(counting_cache, **options) as plain,
        RowLoader(counting_cache, **options, ranges=make_source(counting_cache)) as loader,
    ):
        for _ in range(40):
            assert np.array_equal(loader.next(7), plain.next(7))


def test_no_more_than_the_read_ahead_is_lent(make_source, counting_cache):
    counted = Counting(make_source(counting_cache))
    with RowLoader(counting_cache, context=10, seed=3, read_ahead=2, ranges=counted) as loader:
        loader.next(100)
        loader.next(100)
    assert counted.most == 3


class Counting:
    """How many ranges are lent at once."""

    def __init__(self, source: RangeSource) -> None:
        self._source = source
        self._lent = self.most = 0

    def load(self, split, start, stop):
        self._lent += 1
        self.most = max(self.most, self._lent)
        return self._source.load(split, start, stop)

    def release(self, tokens):
        self._lent -= 1
        self._source.release(tokens)

    def close(self):
        self._source.close()


def test_nothing_is_left_in_shared_memory(make_source, counting_cache):
    folder = Path("/dev/shm")
    before = set(os.listdir(folder)) if folder.exists() else set()
    source = make_source(counting_cache)
    tokens = source.load("train", 0, 500)
    mine = [name for name in set(os.listdir(folder)) - before if "tinyllm" in name] if folder.exists() else []
    assert mine == []
    assert tokens.size == 500


def test_without_an_address_the_files_are_read(counting_cache):
    assert isinstance(open_ranges(counting_cache, None), FileRanges)


def test_where_there_are_no_servers_the_files_are_read(counting_cache, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert isinstance(open_ranges(counting_cache, "@nobody"), FileRanges)
