"""Kills sessions of studies at random moments and resumes them: `python tests/tune/kill_sessions.py --kills 1000`.

Supervisor, channel, journal, mirror, folder, driver, report and resume are the product's own; only Ray and what it
measures are played. Sessions are forked from this process, which has imported everything once, so that a kill takes
tenths of a second. Ends with status 0 where no promise was broken, and says what was killed.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from played_ray import LOG, RECIPE, SPACE, key_of, play_ray, run_session
from session_processes import Ended, alive, children, copies, stall

from tinyllm_ray import journal
from tinyllm_ray.config import load
from tinyllm_ray.tune.mirror import _journals, private_folder
from tinyllm_ray.tune.sessions import read_sessions

BUDGET_SECONDS = 7200
REMEASURED = {"lost", "timed_out"}
TICK_SECONDS = 0.011
"""The system tells a process's start in hundredths."""


class Broken(Exception):
    """A promise was."""


def hold(promise: bool, what: str) -> None:
    if not promise:
        raise Broken(what)


@dataclass
class Sessions:
    """One study in `folder`, from its begin to its end, however often it is killed."""

    folder: Path
    chance: random.Random
    killed: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    helpers: list[int] = field(default_factory=list)
    walls: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By session: the least and the most it can have lasted."""

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def run(self, most_kills: int) -> None:
        """Sessions until the study is over; at most so many are killed."""
        (self.folder / "recipe.yaml").write_text(RECIPE)
        (self.folder / "space.yaml").write_text(SPACE)
        while not self._session(spare=self.kills >= most_kills):
            self.check_after_kill()

    def _session(self, *, spare: bool) -> bool:
        """Whether it came to the study's end."""
        log_lines = len(self.log())
        arguments = ["--budget", f"{BUDGET_SECONDS}s", "--config", "recipe.yaml", "--space", "space.yaml"]
        arguments += ["--runs", "100000000", "--out", "out", "--resume"]
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = run_session(self.folder, arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        forked, end = time.monotonic(), Ended(pid)
        if not spare:
            self._wait_for_the_moment(end, log_lines)
        if spare or end():
            status = end.wait()
            hold(status == 0, f"a session that was left alone ended with status {status}")
            return True
        before = {entry["session"]: entry["seconds"] for entry in read_sessions(self.out)}
        kill_at = time.monotonic()
        victims = self._kill(pid)
        end.wait()
        helpers = [one for name, one in victims.items() if name == "mirror"]
        self.helpers += helpers
        if self.chance.random() < 0.5:  # else the next session begins beside what is left of this one
            while any(alive(one) for one in victims.values()):
                time.sleep(0.002)
            over = time.monotonic()
        else:
            over = float("inf")
        if "mirror" in self._last:  # the supervisor may have started another one
            over = float("inf")
        begun = [line["session"] for line in self.log()[log_lines:] if line["kind"] == "begun"]
        if begun and begun[0] in before:
            exact = helpers and "mirror" not in self._last
            self.walls[begun[0]] = (kill_at - forked if exact else before[begun[0]], over - began + TICK_SECONDS)
        return False

    def _wait_for_the_moment(self, end: Ended, log_lines: int) -> None:
        """Any moment: some by time, some soon after a record."""
        if self.chance.random() < 0.3:
            until = time.monotonic() + self.chance.uniform(0, 0.5)
            while time.monotonic() < until and not end():
                time.sleep(0.002)
            return
        wanted, log = log_lines + self.chance.randint(1, 8), self.folder / LOG
        while not end() and not (log.exists() and log.read_bytes().count(b"\n") >= wanted):
            time.sleep(0.002)
        time.sleep(self.chance.uniform(0, 0.015))

    def _kill(self, pid: int) -> dict[str, int]:
        """SIGKILL to some of a session's processes; its processes by name."""
        found = {"supervisor": pid, **children(pid)}
        choices = [
            ("supervisor",),
            ("study",),
            ("supervisor", "study"),
            ("supervisor", "guard"),
            ("supervisor", "mirror"),
            ("mirror", "supervisor"),
            ("study", "mirror"),
            ("supervisor", "study", "guard", "mirror"),
        ]
        if self.chance.random() < 0.3:  # a supervisor that gets no processor for a moment
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.chance.uniform(0, 0.05))
        if "mirror" in found and self.chance.random() < 0.2:
            stall(found["mirror"], self.chance.uniform(0, 1.5))
        names = [name for name in self.chance.choice(choices) if name in found] or ["supervisor"]
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[name], signal.SIGKILL)
            if self.chance.random() < 0.3:
                time.sleep(self.chance.uniform(0, 0.01))
        os.kill(pid, signal.SIGCONT if "study" in names else signal.SIGKILL)
        self._last = names
        self.kills += 1
        self.killed[" and ".join(names)] += 1
        return found

    # What has to hold

    def log(self) -> list[dict[str, Any]]:
        return journal.read_lines(self.folder / LOG)

    def check_after_kill(self) -> None:
        """Nothing is torn, nothing lost, nothing there twice."""
        acknowledged = [line["key"] for line in self.log() if line["kind"] == "recorded"]
        summary = self.summary()  # parses, or there is none
        if (self.out / "selected.yaml").exists():
            load(self.out / "selected.yaml")
        known = self.known_records()
        self.check_records(known)
        missing = set(acknowledged) - {key_of(record) for record in known}
        hold(not missing, f"acknowledged and lost: {sorted(missing)}")
        rates = {record["candidate"]: record["targets_per_second"] for record in known}
        for row in summary.get("candidates", ()):
            if row["targets_per_second"] is not None:
                hold(row["candidate"] in rates, f"{row['candidate']} was shown as measured, and is in no record")

    def known_records(self) -> list[dict[str, Any]]:
        """The journals' and OUT's, each once; what is brought from the one to the other meanwhile included."""
        folder = private_folder() / (self.study() or "none")
        local = [record for path in _journals([folder]) for record in journal.read_lines(path)]
        present = journal.read_lines(self.out / "trials.jsonl")
        return present + [record for record in local if record not in present]

    def study(self) -> str | None:
        path = self.out / "study.yaml"
        return path.read_text().splitlines()[0].removeprefix("study: ").strip("'") if path.exists() else None

    def summary(self) -> dict[str, Any]:
        path = self.out / "summary.json"
        summary: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        return summary

    def check_records(self, records: Sequence[dict[str, Any]]) -> None:
        twice = [key for key, count in Counter(map(key_of, records)).items() if count > 1]
        hold(not twice, f"recorded twice: {twice}")
        settled: set[str] = set()
        executions: dict[str, str] = {}
        for record in records:
            name = record["candidate"]
            hold(name not in settled, f"{name} was measured again after it had a result")
            hold(
                executions.setdefault(name, record["execution_identity"]) == record["execution_identity"],
                f"{name} is two",
            )
            if record["fate"] not in REMEASURED:
                settled.add(name)

    def check_at_the_end(self) -> None:
        """OUT holds everything, the local disk nothing, and every second is charged once."""
        while any(copies(pid) for pid in self.helpers):  # one that got no processor for a while is late
            time.sleep(0.01)
        self.check_after_kill()
        present = journal.read_lines(self.out / "trials.jsonl")
        hold(present == self.known_records(), "OUT lags behind the local journals")
        summary = self.summary()
        hold(summary["ended"] is not None and summary["selected"] is not None, "the study has no end")
        measured = {record["candidate"]: record["fate"] for record in present}
        rows = {row["candidate"]: row["state"] for row in summary["candidates"] if row["candidate"] in measured}
        hold(rows == measured, f"the summary's candidates are not the records': {rows}, {measured}")
        local = list(Path(tempfile.gettempdir()).glob(f"tinyllm_ray-*/{self.study()}"))
        hold(not local, f"left behind: {local}")
        torn = [path.name for path in self.out.rglob("*") if journal.is_torn(path)]
        hold(not torn, f"left behind: {torn}")
        self.check_seconds(summary)

    def check_seconds(self, summary: dict[str, Any]) -> None:
        files = {entry["session"]: entry["seconds"] for entry in read_sessions(self.out)}
        entries = {entry["session"]: entry["seconds"] for entry in summary["sessions"]}
        hold(
            abs(sum(entries.values()) - summary["elapsed_seconds"]) < 1e-6, "the sessions' seconds are not the budget's"
        )
        trials = sum(entry["trials"] for entry in summary["sessions"])
        hold(trials == len(journal.read_lines(self.out / "trials.jsonl")), "a trial is in no session")
        for session, (least, most) in self.walls.items():
            hold(session in entries, f"the session {session} is charged nothing")
            charged = entries[session]
            own = files.get(session, 0.0)  # none where it was killed before it wrote one
            hold(charged >= own, f"{session}: {charged}, and {own} in its file")
            hold(least <= charged <= most, f"{session} is charged {charged}, and lasted {least} to {most}")
        # Each session was given what those before it had left.
        before = 0.0
        begun = {line["session"]: line["left"] for line in self.log() if line["kind"] == "begun"}
        for session, seconds in entries.items():
            left = begun.get(session, 0.0)  # none where it was killed before its study began
            hold(left <= BUDGET_SECONDS - before, f"{session} had {left} of the budget")
            before += seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    play_ray()
    chance = random.Random(seed)
    killed: Counter[str] = Counter()
    studies = records = 0
    while sum(killed.values()) < options.kills:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            study = Sessions(Path(folder), random.Random(chance.random()))
            try:
                study.run(options.kills - sum(killed.values()))
                study.check_at_the_end()
            except Exception as error:
                said = Path(folder, "said").read_text()
                print(said[min(len(said) - 4000, said.rfind("Traceback")) :], error, f"seed {seed}", sep="\n")
                return 1
            killed += study.killed
            studies += 1
            records += len(study.known_records())
    count = sum(killed.values())
    print(f"{count} kills in {studies} studies with {records} records; none lost, none twice: {dict(killed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
