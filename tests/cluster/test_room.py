"""A cluster that cannot hold a trial, or no longer, ends the study instead of its budget."""

import pytest
from fakes import FakeClock

from tinyllm_ray.cluster.room import Resources, Room
from tinyllm_ray.errors import ConfigError

GPU_NODE = {"CPU": 16.0, "GPU": 1.0, "memory": 1e9}
HEAD = {"CPU": 4.0, "memory": 1e9}


class Cluster:
    """Its nodes may go."""

    def __init__(self, *nodes: Resources) -> None:
        self.nodes = list(nodes)
        self.clock = FakeClock()

    def room(self, **asked: float) -> Room:
        return Room(asked, lambda: self.nodes, self.clock)


@pytest.mark.parametrize(
    ("node", "asked", "said"),
    [
        (HEAD, {"GPU": 1, "CPU": 4}, "a trial takes 1 GPU and 4 CPU, and the nodes alive have 0 GPU and 4 CPU"),
        ({"CPU": 72.0}, {"CPU": 200}, "a trial takes 200 CPU, and the nodes alive have 72 CPU"),
        ({"CPU": 0.0, "GPU": 8.0}, {"GPU": 1, "CPU": 1}, "takes 1 GPU and 1 CPU, and the nodes alive have 8 GPU and 0"),
    ],
)
def test_what_never_fits_is_refused_with_asked_and_available(
    node: Resources, asked: dict[str, float], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Cluster(node).room(**asked)


def test_halves_on_two_nodes_hold_no_trial() -> None:
    with pytest.raises(ConfigError, match="the nodes alive have 0 GPU and 4 CPU; 1 GPU and 0 CPU"):
        Cluster(HEAD, {"GPU": 1.0}).room(GPU=1, CPU=4)


def test_losing_the_last_node_that_fits_ends_the_study_within_seconds() -> None:
    cluster = Cluster(HEAD, GPU_NODE, GPU_NODE)
    room = cluster.room(GPU=1, CPU=16)
    cluster.nodes.pop()
    cluster.clock.advance(1000)
    assert not room.stop_all(), "one is left"
    cluster.nodes.pop()
    waited = 0.0
    while not room.stop_all():
        cluster.clock.advance(0.1)
        waited += 0.1
    assert 10 < waited < 20
    assert room.reason == "nodes lost: a trial takes 1 GPU and 16 CPU, and the nodes alive have 0 GPU and 4 CPU"
    assert not room("trial", {})


def test_a_node_that_comes_back_is_waited_for() -> None:
    cluster = Cluster(GPU_NODE)
    room = cluster.room(GPU=1)
    for _ in range(3):
        cluster.nodes.clear()
        for _ in range(5):
            cluster.clock.advance(2.5)
            assert not room.stop_all()
        cluster.nodes.append(GPU_NODE)
        cluster.clock.advance(2.5)
        assert not room.stop_all()
