"""The deadline over a real study on real Ray, whatever stops answering: kept within two seconds, nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinyllm_ray.data.prepare import CACHE_VARIABLE
from tinyllm_ray.tune.processes import STUDY_VARIABLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

BUDGET_SECONDS = 60
LONG_SPACE = """
baseline: {micro_batch_size: 8, cpu_threads: 1}
factors: {micro_batch_size: [4, 8]}
protocol: {warmup_updates: 1, windows: 3, updates_per_window: 100}
"""
# Names as /proc has them, cut at 15 characters. The candidate is a fork of its starter and has its name.
FAULTS = {
    "Ray's store of the cluster's state": ["gcs_server"],
    "the node's Ray process": ["raylet"],
    "the actor that holds the device": ["ray::CandidateT"],
    "the starter and the candidate": ["python starter"],
    "everything of Ray": ["gcs_server", "raylet", "ray::CandidateT"],
}


class Running:
    """A study whose candidates take most of its budget."""

    def __init__(self, process: "subprocess.Popen[str]", began: float, out: Path) -> None:
        self.process, self.began, self.out = process, began, out

    def members(self) -> dict[int, str]:
        """What it started, by process id."""
        found = {self.process.pid: "supervisor"}
        table = dict(_processes())
        while more := {pid for pid, (_, parent) in table.items() if parent in found} - found.keys():
            found |= {pid: table[pid][0] for pid in more}
        return {pid: name for pid, name in found.items() if pid != self.process.pid}

    def stop(self, names: list[str]) -> None:
        for name in names:
            chosen = [pid for pid, own in self.members().items() if own == name]
            assert chosen, (name, self.members())
            for pid in chosen:
                os.kill(pid, signal.SIGSTOP)

    def lateness(self) -> float:
        """Waits for the end; seconds past the deadline."""
        self.process.wait(timeout=BUDGET_SECONDS + 30)
        return time.monotonic() - self.began - BUDGET_SECONDS


def _processes() -> Iterator[tuple[int, tuple[str, int]]]:
    """Process id, name and parent of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                head, _, rest = (entry / "stat").read_text().rpartition(") ")
                starter = b"tinyllm_ray.train.starter" in (entry / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            yield int(entry.name), ("python starter" if starter else head.partition("(")[2], int(rest.split()[1]))


@pytest.fixture
def running(built_root: Path, tiny: Path, tmp_path: Path) -> Iterator[Running]:
    """Stopped in nothing yet; its first candidate is timing windows."""
    (tmp_path / "space.yaml").write_text(LONG_SPACE)
    command = [sys.executable, "-m", "tinyllm_ray.tune", "--budget", f"{BUDGET_SECONDS}s", "--out", "study"]
    command += ["--config", str(tiny / "recipe.yaml"), "--space", "space.yaml"]
    environment = os.environ | {CACHE_VARIABLE: str(built_root)}
    began = time.monotonic()
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=said, text=True)
    study = Running(process, began, tmp_path)
    while not any(name == "ray::CandidateT" for name in study.members().values()) or not _measuring(tmp_path / "study"):
        assert process.poll() is None, (tmp_path / "said").read_text()
        assert time.monotonic() - began < BUDGET_SECONDS - 8, "it never came to measuring"
        time.sleep(0.05)
    yield study
    process.kill()


def _measuring(study: Path) -> bool:
    """Whether the first candidate's process is there: it has opened its log."""
    return any((study / "candidates").glob("c*.log"))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_answer_makes_nothing_late(running: Running, fault: str) -> None:
    members = running.members()
    running.stop(FAULTS[fault])
    assert running.lateness() < 2.0
    said = (running.out / "said").read_text()
    assert "Traceback" not in said
    summary = json.loads((running.out / "study" / "summary.json").read_text())
    assert running.process.returncode == (3 if summary["selected"] is None else 0), said
    left = {pid: name for pid, name in members.items() if _marked(pid)}
    assert not left, "processes outlive the study"


def _marked(pid: int) -> bool:
    """Whether the process is still there, and not another one of the same number."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
        return state not in "ZX" and STUDY_VARIABLE.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
