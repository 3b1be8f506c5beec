"""Nodes that a study can no longer use go back to Slurm: which they are, and what the launcher does with them."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.cluster.hand_back import HAND_BACK_VARIABLE, HandBack
from tinyllm_ray.cluster.steps import Steps
from tinyllm_ray.cluster.surplus import NodeUse, Surplus
from tinyllm_ray.errors import ConfigError

ASKED = {"GPU": 1.0, "CPU": 4.0}


def node(number: int, busy: int = 0, gpus: int = 2) -> NodeUse:
    total = {"GPU": float(gpus), "CPU": 4.0 * gpus}
    free = {name: amount - busy * ASKED[name] for name, amount in total.items()}
    return NodeUse(f"10.0.0.{number}", total, free)


def surplus(folder: Path, nodes: list[NodeUse]) -> Surplus:
    variables = {HAND_BACK_VARIABLE: str(folder / "handed_back")}
    ticks = itertools.count(0.0, 2.0)
    return Surplus(ASKED, "10.0.0.1", nodes=lambda: nodes, environment=variables, clock=lambda: next(ticks))


def named(folder: Path) -> list[str]:
    path = folder / "handed_back"
    return path.read_text().split() if path.exists() else []


def test_idle_nodes_go_but_for_room_for_the_most_trials_at_once(tmp_path: Path) -> None:
    nodes = [node(1), node(2, busy=1), node(3), node(4), node(5)]
    kept = surplus(tmp_path, nodes)
    kept.started(5)
    assert kept.hand_back() == 6
    assert named(tmp_path) == ["10.0.0.4", "10.0.0.5"]
    assert kept.hand_back() is None, "none twice, while Ray still shows them"
    assert named(tmp_path) == ["10.0.0.4", "10.0.0.5"]


def test_a_verification_keeps_the_node_it_runs_on(tmp_path: Path) -> None:
    nodes = [node(1), node(2), node(3)]
    kept = surplus(tmp_path, nodes)
    kept.started(6)
    assert kept.hand_back() is None
    kept.started(1, "verification")
    nodes[2] = node(3, busy=1)
    assert kept.hand_back() == 4
    assert named(tmp_path) == ["10.0.0.2"]


def test_the_drivers_node_stays_and_a_head_without_gpus_is_none_of_these(tmp_path: Path) -> None:
    kept = surplus(tmp_path, [node(1), node(2, busy=2), node(3, gpus=0)])
    kept.started(1)
    assert kept.hand_back() is None
    assert named(tmp_path) == []


def test_before_any_trial_and_outside_of_a_job_nothing_goes(tmp_path: Path) -> None:
    assert surplus(tmp_path, [node(1), node(2)]).hand_back() is None
    outside = Surplus(ASKED, "10.0.0.1", nodes=lambda: [node(1), node(2)], environment={})
    outside.started(1)
    assert outside.hand_back() is None


class Recorded(Steps):
    """Steps that are ready, and that note which were ended."""

    def __init__(self) -> None:
        super().__init__(Path("logs"), "secret", ["true"])
        self.ready = {f"n{number}": {"node_address": f"10.0.0.{number}"} for number in (1, 2, 3)}
        self.told: list[str] = []

    def end(self, nodes: Any, seconds: float) -> None:
        self.told += nodes


def test_the_launcher_ends_the_steps_and_shrinks_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("slurm_job_7_resize.sh", "slurm_job_77_resize.sh"):
        (tmp_path / name).touch()
    path = tmp_path / "handed_back"
    path.write_text("10.0.0.2\n")  # of an earlier run of the job
    asked: list[tuple[str, ...]] = []
    steps, spare = Recorded(), HandBack(path, 7, "n1", ask=lambda *command: asked.append(command) or "")
    assert spare.look(steps) == []
    path.write_text("10.0.0.3\n10.0.0.1\n10.9.9.9\n")
    assert spare.look(steps) == ["n3"]
    assert spare.look(steps) == []
    assert steps.told == ["n3"], "the head, and what is no node, stay"
    assert asked == [("scontrol", "update", "JobId=7", "NodeList=n1,n2")]
    assert [file.name for file in tmp_path.glob("*.sh")] == ["slurm_job_77_resize.sh"]
    assert "handed back n3" in capsys.readouterr().out


def test_of_an_array_one_task_alone_is_shrunk(tmp_path: Path) -> None:
    asked: list[tuple[str, ...]] = []
    spare = HandBack(tmp_path / "handed_back", 7, "n1", "7_2", ask=lambda *command: asked.append(command) or "")
    spare.path.write_text("10.0.0.3\n")
    assert spare.look(Recorded()) == ["n3"]
    assert asked == [("scontrol", "update", "JobId=7_2", "NodeList=n1,n2")]


def test_a_slurm_that_keeps_the_nodes_costs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*command: str) -> str:
        raise ConfigError("scontrol: Job resizing is disabled")

    steps, spare = Recorded(), HandBack(tmp_path / "handed_back", 7, "n1", ask=refuse)
    spare.path.write_text("10.0.0.2\n")
    assert spare.look(steps) == ["n2"]
    assert "Slurm keeps the nodes in the job: scontrol: Job resizing is disabled" in capsys.readouterr().err
