"""`tune rerun` and `tune validate` on a cluster with GPUs of several kinds, which Ray takes on trust."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import RunModule
from ray.cluster_utils import Cluster
from recorded_studies import replace_records, write_study

from tinyllm_ray.cluster.connect import Connection
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.records import Device
from tinyllm_ray.tune.again.recorded import held_to_kind_of

MATH = {"math": 3000.0}


def write_study_of(device: str, folder: Path, cache_identity: str | None) -> None:
    """A study whose figures come from GPUs of that name."""
    records = write_study(folder, lambda execution: MATH.get(execution["sdpa_backend"], 2000.0), cache_identity)
    on_gpus = [Device(kind="cuda", name=device, host="there")]
    replace_records(folder, [one.model_copy(update={"devices": on_gpus}) for one in records])


def test_a_cluster_of_one_kind_or_without_the_studys_is_left_as_it_is() -> None:
    h200 = Device(kind="cuda", name="NVIDIA H200", host="there")
    for models in ((), ("A100",), ("H200",), ("A100", "V100")):
        cluster = Connection("here", None, False, nodes=2, gpus=8, cores_per_node=64, accelerators=models)
        assert held_to_kind_of(h200, cluster) is cluster
    assert held_to_kind_of(None, cluster) is cluster


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for model in ("A100", "V100"):
        cluster.add_node(num_cpus=1, num_gpus=1, resources={f"accelerator_type:{model}": 1})
    yield cluster.address
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_no_gpu_of_the_cluster_can_measure_is_refused(
    run_module: RunModule, address: str, built_root: Path, tmp_path: Path
) -> None:
    (cache,) = (open_cache(path.parent) for path in built_root.rglob("manifest.json"))
    write_study_of("NVIDIA H200", tmp_path / "study", cache.identity)
    for arguments, said in {
        ("rerun", "study", "c01"): "device is A100 and V100, was NVIDIA H200; `tune validate` asks",
        ("validate", "study"): "(A100, V100), which no study mixes; the study measured on NVIDIA H200: name the kind "
        "that you ask about, by --by-device A100",
        ("validate", "study", "--by-device", "H100"): "--by-device: the cluster has no 'H100'; it has A100, V100",
    }.items():
        done = run_module("tinyllm_ray.tune", *arguments, "--budget", "5m", "--address", address, cwd=tmp_path)
        assert done.status == 2, done.output
        assert said in done.output.splitlines()[-1]
    assert not (tmp_path / "study" / "validations").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_decision_is_asked_of_the_kind_it_was_made_on(
    run_module: RunModule, address: str, built_root: Path, tmp_path: Path
) -> None:
    """There is no such GPU behind Ray's word for it, so that the processes themselves fail."""
    (cache,) = (open_cache(path.parent) for path in built_root.rglob("manifest.json"))
    write_study_of("Tesla V100-SXM2-16GB", tmp_path / "study", cache.identity)
    for options, said in {
        (): "on the study's kind of GPU, V100; the cluster has A100, V100",
        ("--by-device", "A100"): "could not be told",
    }.items():
        done = run_module(
            "tinyllm_ray.tune", "validate", "study", *options, "--out", f"answer{len(options)}", "--budget", "5m",
            *("--address", address), cwd=tmp_path,
        )  # fmt: skip
        assert done.status == 3, done.output
        assert said in done.output
