"""Memory of this process, and what is made of the driver's listing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tinyllm_ray.measure import memory as memory_module
from tinyllm_ray.measure.memory import peak_memory

MEBIBYTE = 2**20

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


class TestDriver:
    """`nvidia-smi` as a script that prints what the real one was seen to print."""

    @pytest.fixture
    def pretend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path / "nvidia-smi"

    @staticmethod
    def write(path: Path, lines: list[str], status: int = 0) -> None:
        said = "\n".join(f"echo '{line}'" for line in lines)
        path.write_text(f"#!/bin/sh\n{said}\nexit {status}\n")
        path.chmod(0o755)

    @pytest.mark.parametrize(
        ("lines", "mebibytes"),
        [
            (["41, 100", "42, 1024", "43, 7"], 1024),
            (["42, 1000", "42, 24"], 1024),
            (["142, 9", "4, 9"], None),
            (["42, [N/A]"], None),
            (["42, [Insufficient Permissions]"], None),
            ([], None),
        ],
    )
    def test_bytes_of_one_process(self, pretend: Path, lines: list[str], mebibytes: int | None) -> None:
        self.write(pretend, lines)
        assert memory_module._driver_bytes(42) == (None if mebibytes is None else mebibytes * MEBIBYTE)

    def test_a_driver_that_fails_tells_nothing(self, pretend: Path) -> None:
        self.write(pretend, ["42, 1024"], status=9)
        assert memory_module._driver_bytes(42) is None

    def test_without_a_driver_there_is_nothing_to_tell(self, pretend: Path) -> None:
        assert memory_module._driver_bytes(42) is None
