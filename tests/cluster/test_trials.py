"""Trials over a real local Ray, with a scripted driver in place of the study: the Tune adapter, and prefetch actors."""

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from command_line import ONE_CANDIDATE, RunModule
from scripted_driver import ScriptedDriver, tiny_request
from small_caches import write_cache

from tinyllm_ray.cluster.connect import Connection, _start_local, connect
from tinyllm_ray.cluster.prefetch import actor_name, prefetching
from tinyllm_ray.cluster.trials import resources, run_trials
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.range_server import server_address, socket_name, supported
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import Fate, TrialRecord


@pytest.fixture(scope="module")
def connection() -> Iterator[Connection]:
    """Without the dashboard's dozen processes, which take as long to start as all the rest; the main job has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinyllm_ray.cluster.connect._has_dashboard", lambda: False)
        with connect(None) as connection:
            yield connection


class Script(ScriptedDriver):
    """Asks for the given candidates in turn and keeps what is heard of them."""

    def __init__(self, *executions: Mapping[str, Any], on_event: Callable[["Script", Any], None] | None = None) -> None:
        shortest = {"warmup_updates": 1, "windows": 1, "updates_per_window": 1}
        super().__init__([tiny_request(number, one, shortest, cache=None) for number, one in enumerate(executions)])
        self.records: dict[str, TrialRecord] = {}
        self.lost: list[str] = []
        self.actors: list[int] = []
        self.niceness: list[int] = []
        self._on_event = on_event

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "record":
            self.records[candidate] = TrialRecord.model_validate(event["record"])
        if event["event"] == "forked":
            starter = _parent(event["pid"])
            self.actors.append(_parent(starter))
            self.niceness.append(os.getpriority(os.PRIO_PROCESS, event["pid"]))
        if self._on_event:
            self._on_event(self, event)

    def lose(self, candidate: str) -> None:
        self.lost.append(candidate)


def test_candidates_share_one_actor_and_a_failing_one_does_not_end_it(connection: Connection, tmp_path: Path) -> None:
    script = Script({}, {"sdpa_backend": "cudnn"}, {"micro_batch_size": 4})
    run_trials(script, connection, logs=tmp_path / "logs", storage=tmp_path / "tune")
    fates = {candidate: record.fate for candidate, record in script.records.items()}
    assert fates == {"c0": Fate.COMPLETE, "c1": Fate.FAILED, "c2": Fate.COMPLETE}
    assert script.lost == []
    assert len(script.actors) == 3
    assert len(set(script.actors)) == 1
    assert set(script.niceness) == {os.getpriority(os.PRIO_PROCESS, 0)}, "they run as a training does"
    # Tune's storage is the driver's own disk: a trial on another node could write nothing there, and would be lost.
    assert not list((tmp_path / "tune").rglob("checkpoint_*"))


@pytest.mark.long
def test_a_killed_actor_costs_its_candidate_only(connection: Connection, tmp_path: Path) -> None:
    def kill_the_first(script: Script, event: Mapping[str, Any]) -> None:
        if event["event"] == "forked" and len(script.actors) == 1:
            os.kill(script.actors[0], signal.SIGKILL)

    script = Script({}, {"micro_batch_size": 4}, on_event=kill_the_first)
    run_trials(script, connection, logs=tmp_path / "logs", storage=tmp_path / "tune")
    assert script.lost == ["c0"]
    assert {candidate: record.fate for candidate, record in script.records.items()} == {"c1": Fate.COMPLETE}
    assert len(set(script.actors)) == 2


@pytest.mark.long
def test_a_study_joins_a_running_cluster_and_leaves_it_running(
    connection: Connection, run_module: RunModule, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "one.yaml").write_text(ONE_CANDIDATE)
    arguments = ("--config", tiny / "recipe.yaml", "--space", "one.yaml", "--address", connection.address)
    done = run_module("tinyllm_ray.tune", "--budget", "100s", *arguments, "--out", "joined", cwd=tmp_path)
    assert done.status == 0, done.output
    assert f"Ray joined at {connection.address}" in done.output
    assert [node["Alive"] for node in ray.nodes()] == [True]
    assert ray.get(ray.remote(num_cpus=0)(lambda: 7).remote()) == 7


def test_an_address_where_nothing_answers_is_the_users_mistake(run_module: RunModule, tmp_path: Path) -> None:
    done = run_module("tinyllm_ray.tune", "--budget", "60s", "--address", "127.0.0.1:9", "--out", "x", cwd=tmp_path)
    assert done.status == 2, done.output
    assert "no Ray cluster answers at '127.0.0.1:9'" in done.output
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("gpus", "nodes", "cores", "asked"),
    [
        (0, 1, 2, {"CPU": 2}),
        (0, 3, 8, {"CPU": 8}),
        (1, 1, 16, {"GPU": 1, "CPU": 16}),
        (8, 2, 72, {"GPU": 1, "CPU": 18}),
        (4, 1, 2, {"GPU": 1, "CPU": 1}),
    ],
)
def test_every_trial_asks_for_a_gpu_and_its_share_of_cores(
    gpus: int, nodes: int, cores: int, asked: dict[str, int]
) -> None:
    cluster = Connection("", None, True, nodes=nodes, gpus=gpus, cores_per_node=cores)
    assert resources(cluster) == asked


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(("length", "starts"), [(75, True), (76, False)])
def test_a_temporary_folder_too_deep_for_sockets_is_said_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, length: int, starts: bool
) -> None:
    """Python's own socket in it, as the standard library makes it, tells what is too deep."""
    folder = "/" + "t" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    path = f"{folder}/pymp-12345678/listener-12345678"
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="No such file" if starts else "long"):
        listener.bind(path)
    monkeypatch.setattr("tinyllm_ray.cluster.connect._has_dashboard", lambda: True)
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **settings: started.append(settings))
    with nullcontext() if starts else pytest.raises(ConfigError, match=r"TMPDIR /t+: .* 75 characters or fewer"):
        _start_local({})
    assert bool(started) == starts


def test_connecting_takes_no_dead_address_for_a_cluster() -> None:
    with pytest.raises(ConfigError, match="no Ray cluster answers"), connect("not-an-address"):
        pass


# Prefetch actors: trials share what they read, and neither side's death costs the other.

NEEDS_SHARED_MEMORY = pytest.mark.skipif(not supported(), reason="needs Linux's anonymous shared memory")


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    """Six shards of two thousand tokens."""
    tokens = np.random.RandomState(0).randint(0, 32_000, 12_000)
    return write_cache(tmp_path / "cache", {"train": tokens}, shard_tokens=2000, vocab_size=32_000)


class ReadingScript(ScriptedDriver):
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


@pytest.mark.long
@NEEDS_SHARED_MEMORY
def test_trials_share_their_nodes_reads_and_outlive_its_server(
    connection: Connection, cache: TokenCache, tmp_path: Path
) -> None:
    with prefetching("study") as servers:
        assert _statistics(servers)["reads"] == 0
        script = ReadingScript(cache, 3, servers)
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


@NEEDS_SHARED_MEMORY
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
