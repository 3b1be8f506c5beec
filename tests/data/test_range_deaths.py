"""Deaths around the range server: what a killed process held is freed, and nobody else notices."""

import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from range_processes import memory_in_use

from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.data.range_server import RangeServer, server_address, supported
from tinyllm_ray.data.range_store import MEMORY_NAME
from tinyllm_ray.data.served_ranges import ServedRanges

pytestmark = pytest.mark.skipif(not supported(), reason="needs Linux's anonymous shared memory")

RANGE_BYTES = 200  # of a hundred tokens
PROCESSES = Path(__file__).with_name("range_processes.py")


@pytest.fixture
def address() -> str:
    return server_address("test", secrets.token_hex(8))


@pytest.fixture
def start_process(child_environment):
    """start_process("server", ...) starts one of range_processes and waits for its first line."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, str(PROCESSES), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment,
        )
        started.append(process)
        line = process.stdout.readline()
        assert line, "it did not come up"
        return process, line

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_server_killed_at_batch_twenty_changes_no_row(start_process, address, counting_cache, caplog):
    server, _ = start_process("server", address, 10**6)
    ranges = ServedRanges(counting_cache, address)
    options = {"context": 10, "seed": 1, "shards_per_range": 2}
    with RowLoader(counting_cache, **options) as plain, RowLoader(counting_cache, **options, ranges=ranges) as loader:
        for batch in range(1, 61):
            assert np.array_equal(loader.next(4), plain.next(4)), batch
            if batch == 20:
                server.kill()
                server.wait()
            if batch == 40:
                assert "range server: " in caplog.text
                start_process("server", address, 10**6)


def test_a_hundred_killed_clients_leave_nothing(start_process, address, counting_cache):
    before, listing = memory_in_use(MEMORY_NAME), set(os.listdir("/dev/shm"))
    server, _ = start_process("server", address, 3 * RANGE_BYTES)
    source = ServedRanges(counting_cache, address)
    source.load("train", 0, 100)
    source.close()
    descriptors = len(os.listdir(f"/proc/{server.pid}/fd"))
    clients, line = start_process("clients", address, counting_cache.folder, 100)
    assert len(line.split()) == 100
    mapped = memory_in_use(MEMORY_NAME) - before
    assert len(mapped) >= 10  # theirs go on beside the three that the server holds
    clients.communicate("")
    assert clients.returncode == 0
    last = ServedRanges(counting_cache, address)
    for start, stop in ((0, 100), (100, 200), (200, 300)):
        last.load("train", start, stop)
    last.close()
    # A client that died is heard of when its connection ends, each in its own time.
    _wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= descriptors + 2)
    _wait_until(lambda: len(memory_in_use(MEMORY_NAME) - before) <= 3)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert memory_in_use(MEMORY_NAME) <= before
    assert not [name for name in set(os.listdir("/dev/shm")) - listing if "tinyllm" in name]
    RangeServer(address, 1000).close()  # the name went with the process


def _wait_until(condition):
    """For what another process does in its own time; pytest's timeout ends a wait in vain."""
    while not condition():
        threading.Event().wait(0.01)
