"""The Ray Tune adapter over a real local Ray, with a scripted driver in place of the study."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from command_line import ONE_CANDIDATE, RunModule
from scripted_driver import ScriptedDriver, tiny_request

from tinyllm_ray.cluster.connect import Connection, connect
from tinyllm_ray.cluster.trials import resources, run_trials
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import Fate, TrialRecord


@pytest.fixture(scope="module")
def connection() -> Iterator[Connection]:
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


def test_a_killed_actor_costs_its_candidate_only(connection: Connection, tmp_path: Path) -> None:
    def kill_the_first(script: Script, event: Mapping[str, Any]) -> None:
        if event["event"] == "forked" and len(script.actors) == 1:
            os.kill(script.actors[0], signal.SIGKILL)

    script = Script({}, {"micro_batch_size": 4}, on_event=kill_the_first)
    run_trials(script, connection, logs=tmp_path / "logs", storage=tmp_path / "tune")
    assert script.lost == ["c0"]
    assert {candidate: record.fate for candidate, record in script.records.items()} == {"c1": Fate.COMPLETE}
    assert len(set(script.actors)) == 2


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


def test_connecting_takes_no_dead_address_for_a_cluster() -> None:
    with pytest.raises(ConfigError, match="no Ray cluster answers"), connect("not-an-address"):
        pass
