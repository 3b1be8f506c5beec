"""Clusters with GPUs of several kinds: no study mixes their figures, and one can be held to a kind."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray.cluster_utils import Cluster
from scripted_driver import ScriptedDriver, tiny_request

from tinyllm_ray.cluster.connect import Connection, connect, held_to
from tinyllm_ray.cluster.gpu_models import model_called, refuse_mixture
from tinyllm_ray.cluster.trials import concurrency, resources, run_trials
from tinyllm_ray.errors import ConfigError

SHORT = {"warmup_updates": 1, "windows": 1, "updates_per_window": 1}


def connection(*models: str, only: str | None = None) -> Connection:
    return Connection("here", None, False, nodes=2, gpus=8, cores_per_node=64, accelerators=models, only=only)


def test_gpus_of_several_kinds_are_refused_with_the_way_to_study_each() -> None:
    refuse_mixture((), "study {}")
    refuse_mixture(("H200",), "study {}")
    with pytest.raises(ConfigError, match=r"several kinds \(A100, H200\), which no study mixes; study A100$"):
        refuse_mixture(("A100", "H200"), "study {}")


@pytest.mark.parametrize(
    ("device", "model"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA H200 MIG 1g.18gb", "H200"),
        ("NVIDIA L40S", None),
    ],
)
def test_a_device_is_of_the_model_that_ray_has_for_its_name(device: str, model: str | None) -> None:
    models = ("A100", "GH200", "H200", "L40", "RTX-PRO-6000", "V100")
    assert model_called(device, models) == model
    ray = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(device)
    assert model_called(device, (ray,)) == ray, "as Ray itself names it"


def test_trials_ask_for_the_kind_that_the_study_is_held_to() -> None:
    assert resources(connection("H200")) == {"GPU": 1, "CPU": 16}
    assert resources(connection("H200", only="H200")) == {"GPU": 1, "CPU": 16, "accelerator_type:H200": 0.001}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head that holds no trial, and a node of each of two kinds; the first has room for more."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=2, num_gpus=2, resources={"accelerator_type:A100": 1})
    cluster.add_node(num_cpus=1, num_gpus=1, resources={"accelerator_type:H200": 1})
    yield cluster.address
    cluster.shutdown()


class Script(ScriptedDriver):
    """Three candidates, and the places where they ran."""

    def __init__(self) -> None:
        super().__init__([tiny_request(number, {}, SHORT, cache=None) for number in range(3)])
        self.places: list[str] = []

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "record":
            self.places.append(event["place"])

    def lose(self, candidate: str) -> None:
        raise AssertionError(f"{candidate} was lost")


@pytest.mark.slow
def test_a_study_held_to_a_kind_runs_where_that_is_and_nowhere_else(address: str, tmp_path: Path) -> None:
    with connect(address) as all_of_it:
        assert all_of_it.accelerators == ("A100", "H200")
        later = held_to(all_of_it, "A100")
        assert (later.accelerators, later.nodes, later.gpus, later.only) == (("A100",), 1, 2, "A100")
        assert later.started is False
    with connect(address, "H200") as one:
        assert (one.accelerators, one.nodes, one.gpus, concurrency(one)) == (("H200",), 1, 1, 1)
        script = Script()
        assert run_trials(script, one, logs=tmp_path / "logs", storage=tmp_path / "tune") is None
    assert len(script.places) == 3
    assert len(set(script.places)) == 1
    with (
        pytest.raises(ConfigError, match=r"--by-device: the cluster has no 'H100'; it has A100, H200$"),
        connect(address, "H100"),
    ):
        pass
