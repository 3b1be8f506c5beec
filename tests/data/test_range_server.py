"""The range server: one read for everyone, bounded memory, and nothing that anyone's death leaves behind."""

import logging
import mmap
import os
import secrets
import socket
import threading
from pathlib import Path

import pytest
from range_processes import memory_in_use

from tinyllm_ray.data import range_server, served_ranges
from tinyllm_ray.data.cache import TokenCache, open_cache
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.data.range_server import RangeServer, server_address, socket_name, supported
from tinyllm_ray.data.range_store import MEMORY_NAME, RangeMemory
from tinyllm_ray.data.served_ranges import ServedRanges
from tinyllm_ray.errors import ConfigError

pytestmark = pytest.mark.skipif(not supported(), reason="needs Linux's anonymous shared memory")

RANGE_BYTES = 200  # of a hundred tokens


class SlowCache(TokenCache):
    """Notes what is read, and reads once it is allowed to."""

    def __init__(self, folder: Path) -> None:
        opened = open_cache(folder)
        super().__init__(opened.folder, opened.manifest)
        self.read, self.allowed = [], threading.Event()

    def read_into(self, split, start, out):
        self.read.append(start)
        self.allowed.wait()
        super().read_into(split, start, out)


@pytest.fixture
def address() -> str:
    return server_address("test", secrets.token_hex(8))


@pytest.fixture
def serve(address):
    """serve(limit_bytes=...) starts a server in this process; its cache is `slow.cache`."""
    servers = []

    def start(limit_bytes=10**6, cache=None):
        server = RangeServer(address, limit_bytes, *([lambda folder: cache] if cache else []))
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def spans(count=10):
    return [(start, start + 100) for start in range(0, count * 100, 100)]


def test_eight_clients_read_the_disk_once(serve, address, counting_cache):
    cache = SlowCache(counting_cache.folder)
    server, asked = serve(cache=cache), threading.Semaphore(0)
    inner = server.store.get

    def get(*arguments):
        future = inner(*arguments)
        asked.release()
        return future

    server.store.get = get
    found = []

    def take():
        with RowLoader(
            counting_cache, context=10, seed=1, shards_per_range=1, ranges=ServedRanges(counting_cache, address)
        ) as loader:
            found.append(loader.next(100))

    clients = [threading.Thread(target=take) for _ in range(8)]
    for client in clients:
        client.start()
    for _ in clients:
        asked.acquire()
    assert len(cache.read) == 1  # all eight have asked and wait for one read
    cache.allowed.set()
    for client in clients:
        client.join()
    assert len(found) == 8
    assert all((batch == found[0]).all() for batch in found)
    # No range is left out, and none is read twice (the order's next pass is read ahead from what is held).
    assert sorted(cache.read) == sorted({start for start, _ in spans()})


def test_what_is_held_is_bounded_and_the_least_recent_goes(serve, address, counting_cache):
    server = serve(3 * RANGE_BYTES)
    source = ServedRanges(counting_cache, address)
    for start, stop in spans(3):
        source.load("train", start, stop)
    assert (server.store.reads, server.store.held_bytes) == (3, 3 * RANGE_BYTES)
    source.load("train", 0, 100)  # now the most recent
    source.load("train", 300, 400)
    assert (server.store.reads, server.store.held_bytes) == (4, 3 * RANGE_BYTES)
    source.load("train", 0, 100)
    assert server.store.reads == 4
    source.load("train", 100, 200)
    assert (server.store.reads, server.store.held_bytes) == (5, 3 * RANGE_BYTES)


def test_reads_beside_each_other_keep_to_the_limit(serve, address, counting_cache):
    cache = SlowCache(counting_cache.folder)
    server = serve(2 * RANGE_BYTES, cache)
    found = {}

    def take(start, stop):
        found[start] = ServedRanges(counting_cache, address).load("train", start, stop).tolist()

    clients = [threading.Thread(target=take, args=span) for span in spans()]
    for client in clients:
        client.start()
    while server.store.held_bytes < 2 * RANGE_BYTES:
        threading.Event().wait(0.001)
    assert server.store.held_bytes == 2 * RANGE_BYTES
    assert len(server.store._entries) >= 2
    cache.allowed.set()
    for client in clients:
        client.join()
    assert found == {start: list(range(start, stop)) for start, stop in spans()}
    assert server.store.held_bytes <= 2 * RANGE_BYTES


def test_a_range_larger_than_the_limit_is_read_by_the_client(serve, address, counting_cache, caplog):
    server = serve(RANGE_BYTES)
    source = ServedRanges(counting_cache, address)
    assert source.load("train", 0, 101).tolist() == list(range(101))
    assert "202 bytes does not fit into the server's 200 bytes" in caplog.text
    assert server.store.reads == 0
    assert source.load("train", 0, 100).size == 100
    assert server.store.reads == 1


def test_memory_that_is_lent_cannot_be_changed():
    memory = RangeMemory(100, lambda out: out.fill(7))
    assert os.pread(memory.descriptor, 200, 0) == b"\x07" * 100
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, 100)
    descriptor = memory.descriptor
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_clients_map_one_memory(serve, address, counting_cache):
    serve()
    one, other = (ServedRanges(counting_cache, address).load("train", 0, 100) for _ in range(2))
    inodes = memory_in_use(MEMORY_NAME)
    again = ServedRanges(counting_cache, address).load("train", 0, 100)
    assert memory_in_use(MEMORY_NAME) <= inodes  # no copy was made for it
    assert one.tolist() == other.tolist() == again.tolist()


def test_ranges_that_come_and_go_leave_no_descriptor_open(serve, address, counting_cache):
    serve()
    source = ServedRanges(counting_cache, address)
    source.release(source.load("train", 0, 100))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        source.release(source.load("train", 0, 100))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_slow_read_is_waited_for_while_the_server_says_so(serve, address, counting_cache, monkeypatch):
    monkeypatch.setattr(range_server, "_STILL_READING_SECONDS", 0.001)
    cache, said, receive = SlowCache(counting_cache.folder), [], served_ranges._receive

    def count(connection):
        reply = receive(connection)
        said.append("reading" in reply[0])
        if len(said) == 5:
            cache.allowed.set()
        return reply

    monkeypatch.setattr(served_ranges, "_receive", count)
    server = serve(cache=cache)
    assert ServedRanges(counting_cache, address).load("train", 0, 100).tolist() == list(range(100))
    assert said[:5] == [True] * 5
    assert server.store.reads == 1


def test_a_silent_server_costs_one_wait(address, counting_cache, caplog):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(socket_name(address))
        listener.listen()
        source = ServedRanges(counting_cache, address, silence_seconds=0.05)
        assert source.load("train", 0, 100).tolist() == list(range(100))
        listener.accept()[0].close()
        assert source.load("train", 100, 200).tolist() == list(range(100, 200))
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):  # not asked again
            listener.accept()
    assert caplog.text.count("silent for") == 1


def test_a_server_that_comes_later_is_used(serve, address, counting_cache, caplog):
    source = ServedRanges(counting_cache, address)
    for start, stop in spans(3):
        assert source.load("train", start, stop).tolist() == list(range(start, stop))
    assert caplog.text.count("range server: ") == 1
    server = serve()
    source.load("train", 300, 400)
    assert server.store.reads == 1


def test_a_server_that_goes_away_in_mid_read_costs_a_read(serve, address, counting_cache, caplog):
    cache = SlowCache(counting_cache.folder)
    server = serve(cache=cache)
    source, found = ServedRanges(counting_cache, address), []
    client = threading.Thread(target=lambda: found.append(source.load("train", 0, 100).tolist()))
    client.start()
    while not cache.read:
        threading.Event().wait(0.001)
    server.close()
    client.join()
    assert found == [list(range(100))]
    assert "range server: " in caplog.text
    cache.allowed.set()


def test_another_cache_in_its_place_is_not_served(serve, address, make_cache, counting_cache, caplog):
    other = make_cache(range(1, 1006))
    server = serve(cache=open_cache(other.folder))
    assert ServedRanges(counting_cache, address).load("train", 0, 100).tolist() == list(range(100))
    assert f"holds the cache {other.identity[:12]}" in caplog.text
    assert server.store.reads == 0


def test_what_the_server_finds_wrong_reaches_the_client(serve, address, make_cache, caplog):
    caplog.set_level(logging.WARNING)
    cache = make_cache(range(1005))
    path = cache.folder / "train-00000.bin"
    path.unlink()
    server = serve(cache=cache)
    with pytest.raises(ConfigError, match=str(path)) as raised:
        ServedRanges(cache, address).load("train", 0, 100)
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    said = [record.message for record in caplog.records if record.message.startswith("range server: ")]
    assert len(said) == 1
    assert str(path) in said[0]
    assert (server.store.reads, server.store.held_bytes) == (1, 0)


def test_other_users_are_not_served(serve, address, counting_cache, monkeypatch, caplog):
    server = serve()
    monkeypatch.setattr(served_ranges, "same_user", lambda connection: False)
    assert ServedRanges(counting_cache, address).load("train", 0, 100).size == 100
    assert "another user's process" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(range_server, "same_user", lambda connection: False)
    assert ServedRanges(counting_cache, address).load("train", 0, 100).size == 100
    assert server.store.reads == 0


def test_an_address_is_taken_by_one(serve, address):
    serve()
    with pytest.raises(OSError, match="in use"):
        RangeServer(address, 1000)


def test_a_closed_server_holds_nothing_and_its_address_is_free(serve, address, counting_cache):
    server = serve()
    tokens = ServedRanges(counting_cache, address).load("train", 0, 100)
    server.close()
    assert server.store.held_bytes == 0
    assert tokens.tolist() == list(range(100))  # what is mapped stays
    assert serve().clients == 0
