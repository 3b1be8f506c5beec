"""A real study on real Ray goes on after its processes are killed: supervisor, study, Ray's own and its workers."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from tinyllm_ray import journal
from tinyllm_ray.config import load
from tinyllm_ray.data.prepare import CACHE_VARIABLE
from tinyllm_ray.tune.sessions import read_sessions

KILLS = 12
BUDGET = "40m"
OVER = ("space exhausted", "nothing left is expected to save more")
MEASURED_AGAIN = {"lost", "timed_out"}
NAMES = {
    "gcs": b"gcs_server",
    "raylet": b"raylet/raylet",
    "worker": b"ray::",
    "starter": b"tinyllm_ray.train.starter",
}
"""Words in the command lines of what a session consists of."""


class Sessions:
    """One study, whose sessions are killed."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.out = folder / "study"
        self._folder = folder
        self._environment = os.environ | {CACHE_VARIABLE: str(root), "TMPDIR": str(folder)}
        self.command = [sys.executable, "-m", "tinyllm_ray.tune", "--budget", BUDGET, "--out", "study", "--resume"]
        self.command += ["--config", "recipe.yaml", "--space", "space.yaml", "--runs", "1000"]
        self.walls: list[float] = []

    def begin(self) -> "subprocess.Popen[bytes]":
        with (self._folder / "said").open("ab") as said:
            return subprocess.Popen(self.command, cwd=self._folder, env=self._environment, stdout=said, stderr=said)

    def records(self) -> list[dict]:
        """The journals' and OUT's."""
        study = self.out / "study.yaml"
        name = study.read_text().splitlines()[0].removeprefix("study: ").strip("'") if study.exists() else "none"
        paths = sorted(self._folder.glob(f"tinyllm_ray-*/{name}/*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        local = [record for path in paths for record in journal.read_lines(path)]
        present = journal.read_lines(self.out / "trials.jsonl")
        return present + [record for record in local if record not in present]

    def summary(self) -> dict:
        path = self.out / "summary.json"
        return json.loads(path.read_bytes()) if path.exists() else {}


def descendants(pid: int) -> dict[int, bytes]:
    """Command lines of all processes below one."""
    parents, found = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_bytes().rpartition(b") ")[2].split()[1])
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
    below = {pid}
    while more := {one for one, parent in parents.items() if parent in below} - below:
        below |= more
    return {one: found[one] for one in below - {pid}}


def victims(supervisor: int) -> dict[str, list[int]]:
    below = descendants(supervisor)
    found = {name: [pid for pid, line in below.items() if word in line] for name, word in NAMES.items()}
    found["study"] = [pid for pid, line in below.items() if b"tinyllm_ray.tune.study_process" in line]
    return {"supervisor": [supervisor], **{name: pids for name, pids in found.items() if pids}}


def check(study: Sessions, seen: dict[str, dict]) -> None:
    """What was in a journal or in the summary before a kill is there, once."""
    records = study.records()
    keys = Counter((record["candidate"], record["timestamp"]) for record in records)
    assert max(keys.values(), default=1) == 1
    names = [record["candidate"] for record in records if record["fate"] not in MEASURED_AGAIN]
    assert len(names) == len(set(names))
    assert not set(seen) - {json.dumps(record) for record in records}
    rates = {record["candidate"]: record["targets_per_second"] for record in records}
    for row in study.summary().get("candidates", ()):
        assert row["targets_per_second"] is None or row["candidate"] in rates
    if (study.out / "selected.yaml").exists():
        load(study.out / "selected.yaml")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_study_on_ray_goes_on_after_any_kill(tiny: Path, built_root: Path, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="k") as name:  # Ray's sockets want a short path
        folder = Path(name)
        for file in ("recipe.yaml", "space.yaml"):
            (folder / file).write_text((tiny / file).read_text())
        study = Sessions(folder, built_root)
        killed: Counter[str] = Counter()
        ended: Counter[int] = Counter()
        seen: dict[str, dict] = {}
        while killed.total() < KILLS:
            process, begun = study.begin(), time.monotonic()
            known = len(study.records())
            wanted = chance.choice([0, 0, 1, 1, 2])
            moment = begun + chance.uniform(0, 12)
            while process.poll() is None and (time.monotonic() < moment or len(study.records()) < known + wanted):
                time.sleep(0.05)
            if process.poll() is not None:
                ended[process.returncode] += 1
                study.walls.append(time.monotonic() - begun)
                if process.returncode == 0 and study.summary()["ended"].startswith(OVER):
                    break
                continue  # a Ray that did not start in time, on a busy machine: an end like any other
            found = victims(process.pid)
            who = chance.choice(sorted(found))
            seen |= {json.dumps(record): record for record in study.records()}
            os.kill(chance.choice(found[who]), signal.SIGKILL)
            killed[who] += 1
            if who in ("worker", "starter"):  # which a study survives
                continue_until = time.monotonic() + chance.uniform(0, 5)
                while process.poll() is None and time.monotonic() < continue_until:
                    time.sleep(0.05)
                if process.poll() is None:
                    seen |= {json.dumps(record): record for record in study.records()}
                    process.kill()
                    killed["supervisor"] += 1
            process.wait()
            study.walls.append(time.monotonic() - begun)
            check(study, seen)
        print(f"{killed.total()} kills: {dict(killed)}; {len(seen)} records before them; ended by themselves: {ended}")
        while not (study.summary().get("ended") or "").startswith(OVER):
            last, begun = study.begin(), time.monotonic()
            print("one more session ended with", last.wait())
            study.walls.append(time.monotonic() - begun)
        check(study, seen)
        summary = study.summary()
        assert journal.read_lines(study.out / "trials.jsonl") == study.records(), "nothing is left on the local disk"
        assert sum(one["seconds"] for one in summary["sessions"]) == pytest.approx(summary["elapsed_seconds"])
        assert summary["elapsed_seconds"] <= sum(study.walls) + 0.1 * len(study.walls)
        assert sum(one["trials"] for one in summary["sessions"]) == len(study.records())
        assert [one["session"] for one in summary["sessions"]] == [one["session"] for one in read_sessions(study.out)]
        assert (study.out / "report.html").read_text().startswith("<!")
        assert not [path for path in study.out.rglob("*") if journal.is_torn(path)]
