"""Nodes that are lost in mid-trial, on a real Ray of several nodes on this machine."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from scripted_driver import ScriptedDriver, tiny_request

from tinyllm_ray.cluster.connect import Connection, connect
from tinyllm_ray.cluster.trials import concurrency, run_trials
from tinyllm_ray.records import Fate, TrialRecord

pytestmark = pytest.mark.slow

ENDLESS = {"warmup_updates": 1, "windows": 1, "updates_per_window": 1_000_000}
SHORT = ENDLESS | {"updates_per_window": 1}


@pytest.fixture
def connection() -> Iterator[Connection]:
    """Two nodes that hold a trial each, beside a head that holds none."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    try:
        with connect(cluster.address) as connection:
            yield connection
    finally:
        cluster.shutdown()


class Script(ScriptedDriver):
    """Two endless candidates with a short one between them; the node of each endless one is killed under it."""

    def __init__(self) -> None:
        protocols = [ENDLESS, SHORT, ENDLESS, SHORT]
        super().__init__([tiny_request(number, {}, one, cache=None) for number, one in enumerate(protocols)])
        self.records: dict[str, TrialRecord] = {}
        self.lost: list[str] = []

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "record":
            self.records[candidate] = TrialRecord.model_validate(event["record"])
        if event["event"] == "forked" and candidate in {"c0", "c2"}:
            os.kill(_raylet(event["pid"]), signal.SIGKILL)

    def lose(self, candidate: str) -> None:
        self.lost.append(candidate)


def test_a_lost_node_costs_its_candidate_and_the_last_one_the_study(connection: Connection, tmp_path: Path) -> None:
    assert (connection.nodes, concurrency(connection)) == (2, 2)
    script = Script()
    reason = run_trials(script, connection, logs=tmp_path / "logs", storage=tmp_path / "tune")
    assert {candidate: record.fate for candidate, record in script.records.items()} == {"c1": Fate.COMPLETE}
    assert script.lost == ["c0", "c2", "c3"]
    assert reason == "nodes lost: a trial takes 1 CPU, and the nodes alive have 0 CPU"
    assert ray.is_initialized(), "the cluster is left as it is"


def _raylet(candidate: int) -> int:
    """Above the candidate are its starter, the actor and the node's Ray process."""
    process = candidate
    while "raylet" not in Path(f"/proc/{process}/comm").read_text():
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process
