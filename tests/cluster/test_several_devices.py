"""Candidates that have to run in one place of several, on a real Ray of two nodes on this machine."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import RunModule
from ray.cluster_utils import Cluster
from scripted_driver import ScriptedDriver, tiny_request

from tinyllm_ray.cluster.connect import Connection, connect
from tinyllm_ray.cluster.trials import run_trials
from tinyllm_ray.records import Fate, TrialRecord, read_records

pytestmark = pytest.mark.slow

SHORT = {"warmup_updates": 1, "windows": 1, "updates_per_window": 1}


@contextmanager
def cluster_of(head: Mapping[str, int], nodes: int = 0) -> Iterator[Connection]:
    cluster = Cluster()
    try:
        cluster.add_node(**head)
        for _ in range(nodes):
            cluster.add_node(num_cpus=1)
        with connect(cluster.address) as connection:
            yield connection
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Connection]:
    """Two nodes that hold a trial each, beside a head that holds none."""
    with cluster_of({"num_cpus": 0}, nodes=2) as connection:
        yield connection


class Script(ScriptedDriver):
    """Two candidates at once, which show what places there are; then two in the one, and two in the other."""

    def __init__(self) -> None:
        super().__init__([tiny_request(number, {}, SHORT, cache=None) for number in range(6)])
        self.records: dict[str, TrialRecord] = {}
        self.places: dict[str, str] = {}
        self.actors: dict[str, int] = {}
        self.lost: list[str] = []
        self.asked = 0

    def ask(self) -> Mapping[str, Any] | None:
        if self.asked > 1 and len(self.records) + len(self.lost) < self.asked:
            return None  # one after the other, as in a verification
        request = super().ask()
        if request is None:
            return None
        self.asked += 1
        place = {3: "c0", 4: "c0", 5: "c1", 6: "c1"}.get(self.asked)
        return {**request, "place": self.places[place] if place else None}

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "record":
            self.records[candidate] = TrialRecord.model_validate(event["record"])
            self.places[candidate] = event["place"]
        if event["event"] == "forked":
            self.actors[candidate] = _parent(_parent(event["pid"]))

    def lose(self, candidate: str) -> None:
        self.lost.append(candidate)


def test_a_candidate_comes_to_the_gpu_of_a_node_it_has_to_run_on(tmp_path: Path) -> None:
    """Ray takes it on trust that there are two; what runs there are candidates on the processor."""
    with cluster_of({"num_cpus": 2, "num_gpus": 2}) as connection:
        assert (connection.nodes, connection.gpus) == (1, 2)
        check_places(connection, tmp_path)


def test_a_candidate_comes_to_the_node_it_has_to_run_on_and_the_next_one_stays(
    two_nodes: Connection, tmp_path: Path
) -> None:
    check_places(two_nodes, tmp_path)


def check_places(connection: Connection, tmp_path: Path) -> None:
    script = Script()
    reason = run_trials(script, connection, logs=tmp_path / "logs", storage=tmp_path / "tune")
    assert reason is None
    assert script.lost == []
    assert {record.fate for record in script.records.values()} == {Fate.COMPLETE}
    assert sorted(script.records) == [f"c{number}" for number in range(6)]
    one, other = script.places["c0"], script.places["c1"]
    assert one != other, "both began at once"
    assert [script.places[f"c{number}"] for number in range(2, 6)] == [one, one, other, other]
    assert script.actors["c2"] == script.actors["c3"]
    assert script.actors["c4"] == script.actors["c5"]


def test_a_study_of_two_nodes_verifies_its_choice(
    two_nodes: Connection, run_module: RunModule, tiny: Path, tmp_path: Path
) -> None:
    arguments = ("--config", tiny / "recipe.yaml", "--space", tiny / "space.yaml", "--address", two_nodes.address)
    done = run_module("tinyllm_ray.tune", "--budget", "400s", "--runs", "40", *arguments, "--out", "two", cwd=tmp_path)
    assert done.status == 0, done.output
    records = read_records(tmp_path / "two" / "trials.jsonl")
    assert [record.purpose for record in records].count("control") == 1
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    if summary["selected"]["candidate"] != summary["baseline"]["candidate"]:
        assert summary["speedup"]["verified"], done.output
        assert [record.purpose for record in records].count("verification") >= 6
    assert "not verified" not in done.output


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
