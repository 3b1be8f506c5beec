"""Memory of this process, and what is made of the allocator's and the driver's listings."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from tinyllm_ray.measure.memory import driver_bytes, graph_pool_bytes, peak_memory

PEAK = """
import resource
from pathlib import Path
import torch
from tinyllm_ray.measure.memory import peak_memory

page, mebibyte = resource.getpagesize(), 2**20
before = peak_memory(torch.device("cpu")).used_bytes
resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
assert before >= resident * 0.99, "a peak is no less than what is held now"
block = bytearray(before - resident + 128 * mebibyte)
block[::page] = b"x" * len(range(0, len(block), page))
after = peak_memory(torch.device("cpu")).used_bytes
assert after - before > 96 * mebibyte, (before, after)
del block
assert peak_memory(torch.device("cpu")).used_bytes >= after
"""


class TestCpu:
    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to compare with")
    def test_peak_follows_what_was_touched_and_stays(self) -> None:
        """In a process of its own, whose peak nothing before has raised."""
        subprocess.run([sys.executable, "-c", PEAK], check=True)

    def test_total_is_the_machines(self) -> None:
        found = peak_memory(torch.device("cpu"))
        assert found.total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert found.used_bytes is not None
        assert found.total_bytes is not None
        assert found.used_bytes < found.total_bytes

    def test_the_allocators_figures_are_a_gpus(self) -> None:
        found = peak_memory(torch.device("cpu"))
        assert found.peak_allocated_bytes is None
        assert found.peak_reserved_bytes is None
        assert found.graph_pool_bytes is None


def segment(size: int, pool: tuple[int, int] = (0, 0), device: int = 0) -> dict[str, Any]:
    """What is read of an entry of `torch.cuda.memory_snapshot`."""
    return {"device": device, "total_size": size, "segment_pool_id": pool}


class TestGraphPools:
    def test_segments_of_other_pools_than_the_shared_one_count(self) -> None:
        segments = [segment(2), segment(20, (0, 1)), segment(200, (0, 2)), segment(2000, (1, 0))]
        assert graph_pool_bytes(segments, 0) == 2220

    def test_segments_of_another_device_do_not(self) -> None:
        assert graph_pool_bytes([segment(20, (0, 1), device=1), segment(200, (0, 1))], 0) == 200

    def test_without_graphs_there_are_none(self) -> None:
        assert graph_pool_bytes([segment(2)], 0) == 0

    def test_an_allocator_that_does_not_say_is_unknown(self) -> None:
        assert graph_pool_bytes([{"device": 0, "total_size": 2}], 0) is None


class TestDriver:
    """The driver's answers, as `pynvml` gives them."""

    @pytest.fixture
    def processes(self, monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
        found: list[SimpleNamespace] = []
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
        answers = {"GPU-1": found}
        monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda device: answers[device])
        return found

    @pytest.mark.parametrize(
        ("held", "expected"),
        [
            ([(41, 100), (42, 1024), (43, 7)], 1024),
            ([(42, 1000), (42, 24)], 1024),
            ([(142, 9), (4, 9)], None),
            ([(42, None)], None),
            ([(42, None), (42, 24)], None),
            ([], None),
        ],
    )
    def test_bytes_of_one_process(
        self, processes: list[SimpleNamespace], held: list[tuple[int, int | None]], expected: int | None
    ) -> None:
        processes += [SimpleNamespace(pid=pid, usedGpuMemory=count) for pid, count in held]
        assert driver_bytes("GPU-1", 42) == expected

    @pytest.mark.parametrize("failing", ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses"])
    @pytest.mark.usefixtures("processes")
    def test_a_driver_that_fails_tells_nothing(self, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: object) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

        monkeypatch.setattr(pynvml, failing, fail)
        assert driver_bytes("GPU-1", 42) is None

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
    def test_without_a_driver_there_is_nothing_to_tell(self) -> None:
        assert driver_bytes("GPU-1", os.getpid()) is None


@pytest.mark.gpu
class TestGpu:
    def test_every_figure_is_there_and_a_graphs_pool_is_told_apart(self) -> None:
        """In a process of its own, whose peak nothing before has raised."""
        subprocess.run([sys.executable, "-c", GRAPH], check=True)


GRAPH = """
import torch
from tinyllm_ray.measure.memory import peak_memory

device, mebibyte = torch.device("cuda", 0), 2**20
kept = torch.empty(64 * mebibyte, dtype=torch.uint8, device=device)  # a capture gives back what nobody holds
before = peak_memory(device)
assert before.graph_pool_bytes == 0
assert before.peak_allocated_bytes >= 64 * mebibyte
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    held = torch.zeros(256 * mebibyte, dtype=torch.uint8, device=device)
after = peak_memory(device)
assert 256 * mebibyte <= after.graph_pool_bytes < 300 * mebibyte, after
assert after.peak_reserved_bytes >= after.graph_pool_bytes + 64 * mebibyte
# A container's driver may count by other process ids; where it knows this one, a context and the pools are in it.
assert after.used_bytes is None or after.used_bytes >= after.graph_pool_bytes
assert after.total_bytes > after.peak_reserved_bytes
"""
