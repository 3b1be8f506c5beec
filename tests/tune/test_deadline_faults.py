"""The deadline over a real study on real Ray, whatever stops answering: kept within two seconds, nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.data.prepare import CACHE_VARIABLE
from tinyllm_ray.records import Fate, read_records
from tinyllm_ray.train.compile_cache import FOLDER_VARIABLE
from tinyllm_ray.tune.processes import STUDY_VARIABLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

BUDGET_SECONDS = 60
COMPILING_BUDGET_SECONDS = 120
"""Enough that a compilation is admitted after the baseline, which runs eagerly on a CPU."""
GONE_SECONDS = 10.0
"""The promise for processes whose supervisor was killed."""

EAGER = """
baseline: {micro_batch_size: 8, cpu_threads: 1}
factors: {micro_batch_size: [4, 8]}
search_windows: by_count
"""
LONG = EAGER + "protocol: {warmup_updates: 1, windows: 3, updates_per_window: 100}\n"
"""Windows that take most of the budget."""
SHORT = EAGER.replace("[4, 8]", "[8]") + "protocol: {warmup_updates: 1, windows: 1, updates_per_window: 1}\n"
COMPILED = SHORT.replace("}\nsearch_windows", ", update: [eager, compiled]}\nsearch_windows")


# The candidate is a fork of its starter; the actor above it changes its name with every call.
FAULTS = {
    "Ray's store of the cluster's state": ["gcs_server"],
    "the node's Ray process": ["raylet"],
    "the actor that holds the device": ["actor"],
    "the starter and the candidate": ["starter"],
    "everything of Ray": ["gcs_server", "raylet", "actor"],
}


class Running:
    """A study as a command of its own."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]", began: float, budget: int) -> None:
        self.folder, self.process, self.began, self.budget = folder, process, began, budget
        self.out = folder / "study"

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def members(self) -> dict[int, str]:
        """What it started, by process id."""
        found = {self.process.pid: "supervisor"}
        table = dict(_processes())
        while more := {pid for pid, (_, parent) in table.items() if parent in found} - found.keys():
            found |= {pid: table[pid][0] for pid in more}
        starters = {pid for pid, name in found.items() if name == "starter"}
        found |= {table[pid][1]: "actor" for pid in starters if table[pid][1] not in starters}
        return {pid: name for pid, name in found.items() if pid != self.process.pid}

    def send(self, number: signal.Signals, *roles: str) -> dict[int, str]:
        """Send a signal to every process in these roles; what the study had started by then."""
        members = self.members()
        for role in roles:
            chosen = [pid for pid, own in members.items() if own == role]
            assert chosen, (role, members)
            for pid in chosen:
                os.kill(pid, number)
        return members

    def wait_for(self, true: Callable[[], object], what: str) -> None:
        while not true():
            assert self.process.poll() is None, self.said
            assert time.monotonic() - self.began < self.budget - 8, f"it never came to {what}: {self.said}"
            time.sleep(0.05)

    def wait_for_measuring(self) -> None:
        """Until the first candidate is there: it has opened its log, and its actor is known by its starter."""
        self.wait_for(lambda: any((self.out / "candidates").glob("c*.log")), "measuring")

    def lateness(self) -> float:
        """Waits for the end; seconds past the deadline."""
        self.process.wait(timeout=self.budget + 30)
        return time.monotonic() - self.began - self.budget

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return summary


def _processes() -> Iterator[tuple[int, tuple[str, int]]]:
    """Process id, name and parent of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                head, _, rest = (entry / "stat").read_text().rpartition(") ")
                starter = b"tinyllm_ray.train.starter" in (entry / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            yield int(entry.name), ("starter" if starter else head.partition("(")[2], int(rest.split()[1]))


def _left(members: dict[int, str]) -> dict[int, str]:
    """Those that are still there, and not others of the same number."""
    return {pid: name for pid, name in members.items() if _is_marked(pid)}


def _is_marked(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
        return state not in "ZX" and STUDY_VARIABLE.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


@pytest.fixture
def begin(built_root: Path, tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """begin(space, budget=60) starts a study; whatever becomes of the test, nothing of it stays."""
    processes = []

    def start(space: str, budget: int = BUDGET_SECONDS) -> Running:
        (tmp_path / "space.yaml").write_text(space)
        command = [sys.executable, "-m", "tinyllm_ray.tune", "--budget", f"{budget}s", "--out", "study"]
        command += ["--config", str(tiny / "recipe.yaml"), "--space", "space.yaml"]
        environment = os.environ | {CACHE_VARIABLE: str(built_root), FOLDER_VARIABLE: str(tmp_path / "compiled")}
        began = time.monotonic()
        with (tmp_path / "said").open("w") as said:
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=said, text=True)
        processes.append(process)
        return Running(tmp_path, process, began, budget)

    yield start
    for process in processes:
        process.kill()  # its guard ends the rest
        process.wait()


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_answer_makes_nothing_late(begin: Callable[..., Running], fault: str) -> None:
    running = begin(LONG)
    running.wait_for_measuring()
    members = running.send(signal.SIGSTOP, *FAULTS[fault])
    assert running.lateness() < 2.0
    assert "Traceback" not in running.said
    selected = running.summary()["selected"]
    assert running.process.returncode == (3 if selected is None else 0), running.said
    assert not _left(members)


@pytest.mark.parametrize("budget", [2, 30])
def test_a_budget_too_small_for_the_baseline_ends_with_status_3_in_time(
    begin: Callable[..., Running], budget: int
) -> None:
    """Too short for Ray's start, and for a baseline whose windows take hours."""
    running = begin(LONG.replace("windows: 3", "windows: 99").replace("100}", "999999}"), budget)
    assert running.lateness() < 2.0
    assert running.process.returncode == 3, running.said
    # A machine too slow for Ray's start in 30 s says the first of both.
    assert "ended before anything was measured" in running.said or "the baseline needs about" in running.said
    assert "Traceback" not in running.said
    assert not (running.out / "selected.yaml").exists()
    assert not _left(running.members())


def test_a_compilation_that_does_not_end_is_cut_and_named(begin: Callable[..., Running]) -> None:
    running = begin(COMPILED, COMPILING_BUDGET_SECONDS)
    running.wait_for(lambda: "cc1plus" in running.members().values(), "compiling")
    members = running.send(signal.SIGSTOP, "cc1plus")
    assert running.lateness() < 2.0
    assert running.process.returncode == 0, running.said
    baseline, record = read_records(running.out / "trials.jsonl")
    assert (baseline.fate, record.fate) == (Fate.COMPLETE, Fate.TIMED_OUT)
    assert record.reason is not None
    assert record.reason.endswith("during compile")
    assert not _left(members)


def test_a_machine_that_loses_its_ray_ends_with_what_it_has(begin: Callable[..., Running]) -> None:
    running = begin(LONG)
    running.wait_for_measuring()
    members = running.send(signal.SIGKILL, "raylet")
    assert running.lateness() < 2.0
    assert running.process.returncode == 3, running.said
    baseline = running.summary()["candidates"][0]
    assert baseline["state"] == "lost"
    assert baseline["detail"].startswith("its Ray process or node went away during")
    assert not _left(members)


def test_a_ray_that_does_not_shut_down_holds_nobody_up(begin: Callable[..., Running]) -> None:
    running = begin(SHORT)
    running.wait_for(lambda: "next: " in running.said, "its verdict")
    ended = time.monotonic()
    members = {pid: name for pid, name in running.members().items() if name in {"gcs_server", "raylet"}}
    for pid in members:
        os.kill(pid, signal.SIGSTOP)
    assert running.process.wait(timeout=BUDGET_SECONDS) == 0, running.said
    assert time.monotonic() - ended < 15
    assert not _left(members)


def test_a_killed_supervisor_takes_all_of_ray_along(begin: Callable[..., Running]) -> None:
    running = begin(LONG)
    running.wait_for_measuring()
    members = running.members()
    running.process.kill()
    until = time.monotonic() + GONE_SECONDS
    while _left(members) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _left(members)
