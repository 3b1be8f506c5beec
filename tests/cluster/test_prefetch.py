"""Prefetch actors over a real local Ray: trials share what they read, and neither side's death costs the other."""

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from scripted_driver import ScriptedDriver, tiny_request
from small_caches import write_cache

from tinyllm_ray.cluster.connect import Connection, connect
from tinyllm_ray.cluster.prefetch import actor_name, prefetching
from tinyllm_ray.cluster.trials import run_trials
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.range_server import server_address, socket_name, supported
from tinyllm_ray.records import Fate, TrialRecord

pytestmark = pytest.mark.skipif(not supported(), reason="needs Linux's anonymous shared memory")


@pytest.fixture(scope="module")
def connection() -> Iterator[Connection]:
    with connect(None) as connection:
        yield connection


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    """Six shards of two thousand tokens."""
    tokens = np.random.RandomState(0).randint(0, 32_000, 12_000)
    return write_cache(tmp_path / "cache", {"train": tokens}, shard_tokens=2000, vocab_size=32_000)


class Script(ScriptedDriver):
    """Asks for the same candidate `count` times; kills the node's range server when the second has forked."""

    def __init__(self, cache: TokenCache, count: int, servers: str) -> None:
        protocol = {"warmup_updates": 2, "windows": 2, "updates_per_window": 5}
        super().__init__([tiny_request(number, {}, protocol, cache) for number in range(count)])
        self.records: list[TrialRecord] = []
        self.reads: list[int] = []
        self.killed = 0
        self._forked = 0
        self._servers = servers

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "record":
            self.records.append(TrialRecord.model_validate(event["record"]))
            if len(self.records) == 1:
                self.reads.append(_statistics(self._servers)["reads"])
            if len(self.records) == 2:  # the third finds the server that Ray has started again
                while _statistics(self._servers)["process"] == self.killed or not _listens(self._servers):
                    threading.Event().wait(0.05)
        self._forked += event["event"] == "forked"
        if self._forked == 2 and not self.killed:
            self.killed = _statistics(self._servers)["process"]
            os.kill(self.killed, signal.SIGKILL)

    def lose(self, candidate: str) -> None:
        raise AssertionError(f"{candidate} was lost")


def test_trials_share_their_nodes_reads_and_outlive_its_server(
    connection: Connection, cache: TokenCache, tmp_path: Path
) -> None:
    with prefetching("study") as servers:
        assert _statistics(servers)["reads"] == 0
        script = Script(cache, 3, servers)
        run_trials(script, connection, tmp_path / "logs", tmp_path / "tune", servers)
        assert [record.fate for record in script.records] == [Fate.COMPLETE] * 3
        assert script.reads[0] > 0  # the first candidate's tokens came through the server
        after = _statistics(servers)
        assert after["process"] != script.killed  # Ray has started it again
        losses = {tuple(window.loss for window in record.windows) for record in script.records}
        assert len(losses) == 1  # the same rows, whoever read them
        assert after["held_bytes"] > 0  # of ranges that the third asked the new one for
        assert _listens(servers)
        actor = _actor(servers)
    with pytest.raises(ray.exceptions.RayActorError):  # killed on leaving, so waiting for it ends
        ray.get(actor.statistics.remote(), timeout=240)
    while _listens(servers):  # Ray tells of the end a moment before the process is gone
        threading.Event().wait(0.01)


def test_leaving_does_not_wait_for_an_actor_that_hangs(connection: Connection) -> None:
    with prefetching("study") as servers:
        process = _statistics(servers)["process"]
        os.kill(process, signal.SIGSTOP)
    os.kill(process, signal.SIGCONT)  # left by now; pytest's timeout ends a wait


def _statistics(servers: str) -> dict[str, Any]:
    """Of this node's actor, waiting for its start or restart."""
    while True:
        try:
            found: dict[str, Any] = ray.get(_actor(servers).statistics.remote(), timeout=240)
            return found
        except ray.exceptions.ActorUnavailableError:  # it restarts
            threading.Event().wait(0.05)


def _actor(servers: str) -> Any:
    return ray.get_actor(actor_name(servers, ray.get_runtime_context().get_node_id()))


def _listens(servers: str) -> bool:
    address = server_address(servers, ray.get_runtime_context().get_node_id())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knocking:
        return knocking.connect_ex(socket_name(address)) == 0
