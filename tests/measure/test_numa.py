"""NUMA nodes of recorded machines: which are a GPU's memory, which processors are near a GPU."""

import os
from pathlib import Path

import pytest
from recorded_machines import gh200, gh200_four, laptop, two_sockets

from tinyllm_ray.measure.numa import (
    bus_address,
    cpus_near,
    format_list,
    gpu_addresses,
    host_memory,
    memory_only,
    numa_nodes,
    parse_list,
)


def test_a_gh200s_gpu_memory_is_a_node_without_processors(tmp_path: Path) -> None:
    nodes = numa_nodes(gh200(tmp_path))
    assert len(nodes) == 9
    assert [node.number for node in memory_only(nodes)] == [1]  # 2 to 8 are empty, for slices of the GPU
    assert [(node.number, len(node.cpus), node.memory_bytes >> 30) for node in host_memory(nodes)] == [(0, 72, 480)]


def test_four_superchips_have_four_nodes_of_either_kind(tmp_path: Path) -> None:
    nodes = numa_nodes(gh200_four(tmp_path))
    assert [node.number for node in memory_only(nodes)] == [4, 12, 20, 28]
    assert [node.number for node in host_memory(nodes)] == [0, 1, 2, 3]


def test_a_gpus_near_processors_are_its_nodes_and_a_bridge_is_no_gpu(tmp_path: Path) -> None:
    root = gh200_four(tmp_path)
    addresses = gpu_addresses(root)
    assert addresses == ["0009:01:00.0", "0019:01:00.0", "0029:01:00.0", "0039:01:00.0"]
    assert cpus_near(addresses[2], root) == frozenset(range(144, 216))


def test_where_the_bus_names_the_gpus_own_memory_its_near_processors_count(tmp_path: Path) -> None:
    root = gh200(tmp_path)
    (root / "sys/bus/pci/devices/0009:01:00.0/numa_node").write_text("1\n")
    assert cpus_near("0009:01:00.0", root) == frozenset(range(72))


def test_a_bus_that_names_no_node_leaves_its_near_processors(tmp_path: Path) -> None:
    assert cpus_near("0000:01:00.0", laptop(tmp_path)) == frozenset(range(8))
    assert cpus_near("0000:77:00.0", tmp_path) == frozenset()


def test_an_ordinary_server_has_no_memory_without_processors(tmp_path: Path) -> None:
    assert memory_only(numa_nodes(two_sockets(tmp_path))) == []


def test_a_system_without_sys_has_no_nodes_and_no_gpus(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == []
    assert gpu_addresses(tmp_path) == []


def test_this_machines_nodes_have_the_processors_that_this_process_may_use() -> None:
    nodes = numa_nodes()
    assert not nodes or os.sched_getaffinity(0) <= frozenset[int]().union(*(node.cpus for node in nodes))


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("5", {5}), ("x-3,1-", set()), ("3-1", set())]
)
def test_a_list_of_the_kernels_is_read(text: str, numbers: set[int]) -> None:
    assert parse_list(text) == numbers


def test_a_written_list_reads_back() -> None:
    assert format_list([8, 3, 2, 0, 1]) == "0-3,8"
    assert format_list([]) == ""
    assert parse_list(format_list(range(72, 144))) == set(range(72, 144))


def test_nvmls_addresses_become_the_systems() -> None:
    assert bus_address("00000009:01:00.0") == "0009:01:00.0"
    assert bus_address("0000:AB:00.0") == "0000:ab:00.0"
