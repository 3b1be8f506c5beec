"""What the launcher makes of candidates' lives and deaths: real processes, in which only PyTorch is missing."""

import json
import os
import select
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from linux_processes import PATIENCE, alive, ends, group

import tinyllm_ray
from tinyllm_ray.config import Config, identity
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.train import launcher as launcher_module
from tinyllm_ray.train.launcher import Launcher

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches processes as Linux has it")

MakeConfig = Callable[..., Config]
MakeRequest = Callable[..., dict[str, Any]]

REAL_PYTHON = sys.executable
PRETEND_STARTER = Path(__file__).with_name("pretend_starter.py")


class SkewedClock:
    """Real time, plus what a test has let pass."""

    def __init__(self) -> None:
        self.skew = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skew


@pytest.fixture(autouse=True)
def _pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(REAL_PYTHON)} {shlex.quote(str(PRETEND_STARTER))} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", str(Path(tinyllm_ray.__file__).parents[1]))


@pytest.fixture
def clock() -> SkewedClock:
    return SkewedClock()


@pytest.fixture
def launcher(tmp_path: Path, clock: SkewedClock) -> Iterator[Launcher]:
    with build(tmp_path, clock) as launcher:
        yield launcher


def build(folder: Path, clock: SkewedClock) -> Launcher:
    return Launcher(
        logs=folder / "logs",
        compile_cache=str(folder / "compile"),
        environment=lambda: {"python": "3"},
        source={"sha256": "s" * 64, "dirty": False},
        clock=clock,
    )


@pytest.fixture
def request_for(tiny: MakeConfig) -> MakeRequest:
    """A TrialRequest whose candidate plays a part."""

    def make(part: str, **changes: Any) -> dict[str, Any]:
        return {
            "study": "s",
            "candidate": "c001",
            "label": part,
            "config": tiny().model_dump(mode="json"),
            "protocol": {"data_mode": "synthetic", "warmup_updates": 2, "windows": 2, "updates_per_window": 5},
            "cache": None,
            "cache_identity": None,
            "configuration": "candidates/c001.yaml",
            "limit_seconds": PATIENCE,
        } | changes

    return make


def step_until(launcher: Launcher, name: str) -> dict[str, Any]:
    while (event := launcher.step())["event"] != name:
        assert event["event"] != "record", event
    return event


def reach_windows(launcher: Launcher) -> None:
    """Step until both windows are heard of."""
    for _ in range(2):
        step_until(launcher, "window")


def record_of(event: dict[str, Any]) -> TrialRecord:
    assert event["event"] == "record", event
    return TrialRecord.model_validate(event["record"])


def until_record(launcher: Launcher) -> dict[str, Any]:
    while (event := launcher.step())["event"] != "record":
        pass
    return event


def starter_of(launcher: Launcher) -> int:
    assert launcher._starter is not None
    return launcher._starter.pid


def assert_works(launcher: Launcher, request_for: MakeRequest) -> None:
    assert launcher.run(request_for("complete", candidate="next")).fate is Fate.COMPLETE


class TestRecord:
    def test_holds_all_that_was_asked_and_seen(
        self, launcher: Launcher, request_for: MakeRequest, tiny: MakeConfig, tmp_path: Path
    ) -> None:
        record = launcher.run(request_for("complete"))
        assert (record.fate, record.reason) == (Fate.COMPLETE, None)
        assert (record.study, record.candidate, record.kind) == ("s", "c001", "measurement")
        assert record.recipe_identity == tiny().recipe_identity
        assert record.execution == tiny().execution.model_dump(mode="json")
        assert record.execution_identity == identity(record.execution)
        assert (record.source_identity, record.source_dirty, record.cache_identity) == ("s" * 64, False, None)
        assert record.protocol is not None
        assert (record.protocol.data_mode, record.protocol.windows) == ("synthetic", 2)
        assert [window.seconds for window in record.windows] == [0.5, 1.5]
        assert (record.seconds.start, record.seconds.compile, record.seconds.warmup) == (2.0, 3.0, 0.25)
        assert record.seconds.windows == 2.0
        assert record.seconds.total is not None
        assert (record.first_update_seconds, record.warmup_seconds) == (3.0, 3.25)
        assert record.start_stage_seconds == {"fork": 0.5, "runtime": 1.5}
        assert (record.seconds_per_update, record.targets_per_second) == (0.2, 853.0)
        assert (record.memory.used_bytes, record.memory.total_bytes) == (10, 20)
        assert [device.host for device in record.devices] == ["here"]
        assert record.environment.keys() == {"python", "cpu_threads", "import_seconds"}
        assert (record.environment["python"], record.environment["cpu_threads"]) == ("3", 3)
        assert record.environment["import_seconds"] > 0, "the starter's first candidate has it"
        assert record.compile_cache == str(tmp_path / "compile")
        assert record.configuration == "candidates/c001.yaml"

    def test_what_the_candidate_prints_is_in_its_log(
        self, launcher: Launcher, request_for: MakeRequest, tmp_path: Path
    ) -> None:
        launcher.run(request_for("complete"))
        log = (tmp_path / "logs" / "c001.log").read_text()
        assert "complete speaks" in log
        assert "complete complains" in log

    def test_the_environment_is_asked_once(self, request_for: MakeRequest, tmp_path: Path) -> None:
        asked: list[int] = []

        def ask() -> dict[str, Any]:
            asked.append(1)
            return {}

        with Launcher(tmp_path / "logs", "", ask, {"sha256": "", "dirty": None}) as launcher:
            launcher.run(request_for("complete"))
            launcher.run(request_for("complete"))
        assert len(asked) == 1


class TestFate:
    @pytest.mark.parametrize(
        ("part", "fate", "reason"),
        [
            ("not finite", Fate.INVALID, "the loss or the gradient norm is not finite"),
            ("no throughput", Fate.INVALID, "it reported None targets/s, which cannot be compared"),
            ("NaN for a throughput", Fate.INVALID, "it reported nan targets/s, which cannot be compared"),
            ("an infinite throughput", Fate.INVALID, "it reported inf targets/s, which cannot be compared"),
            ("run out of memory", Fate.OUT_OF_MEMORY, "OutOfMemoryError: 3 GiB"),
            ("fail", Fate.FAILED, "RuntimeError: no kernel"),
            ("leave", Fate.FAILED, "the process exited with status 3 during windows"),
            ("interrupt", Fate.FAILED, "the process exited with status 1 during start"),
            (
                "be killed",
                Fate.FAILED,
                "the process was killed by SIGKILL, perhaps by the kernel for want of memory during windows",
            ),
            ("crash", Fate.FAILED, "the process was killed by SIGABRT during windows"),
        ],
    )
    def test_an_end_is_told_and_the_next_candidate_runs(
        self, launcher: Launcher, request_for: MakeRequest, part: str, fate: Fate, reason: str
    ) -> None:
        record = launcher.run(request_for(part))
        assert (record.fate, record.reason) == (fate, reason)
        assert record.targets_per_second is None or part == "not finite"
        starter = starter_of(launcher)
        assert_works(launcher, request_for)
        assert starter_of(launcher) == starter

    def test_what_was_seen_before_the_end_stays(self, launcher: Launcher, request_for: MakeRequest) -> None:
        record = launcher.run(request_for("be killed"))
        assert len(record.windows) == 2
        assert (record.seconds.start, record.seconds.compile, record.seconds.warmup) == (2.0, 3.0, 0.25)
        assert record.seconds.windows == 2.0

    def test_an_escaped_exception_is_in_the_log(
        self, launcher: Launcher, request_for: MakeRequest, tmp_path: Path
    ) -> None:
        launcher.run(request_for("interrupt"))
        assert "KeyboardInterrupt" in (tmp_path / "logs" / "c001.log").read_text()

    def test_a_candidate_killed_from_outside(self, launcher: Launcher, request_for: MakeRequest) -> None:
        launcher.begin(request_for("hang"))
        pid = step_until(launcher, "forked")["pid"]
        reach_windows(launcher)
        os.kill(pid, signal.SIGKILL)
        record = record_of(launcher.step())
        assert record.fate is Fate.FAILED
        assert record.reason is not None
        assert "SIGKILL" in record.reason
        assert len(record.windows) == 2
        assert_works(launcher, request_for)


def test_a_candidate_is_known_before_it_says_anything(
    tmp_path: Path, clock: SkewedClock, request_for: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late its starter is to run again after the fork."""
    monkeypatch.setenv("PRETEND_STARTER_LAGS", "1")
    with build(tmp_path, clock) as launcher:
        launcher.begin(request_for("stop itself"))
        heard = [launcher.step() for _ in range(3)]
        assert [event["event"] for event in heard] == ["ready", "forked", "stage"]
        assert record_of(until_record(launcher)).fate is Fate.COMPLETE


class TestLimit:
    def test_a_hanging_candidate_is_cut_with_what_it_has(
        self, launcher: Launcher, request_for: MakeRequest, clock: SkewedClock
    ) -> None:
        launcher.begin(request_for("hang", limit_seconds=1000))
        pid = step_until(launcher, "forked")["pid"]
        starter = starter_of(launcher)
        reach_windows(launcher)
        clock.skew += 1000
        record = record_of(launcher.step())
        assert (record.fate, record.reason) == (Fate.TIMED_OUT, "cut after 1000 s, during windows")
        assert len(record.windows) == 2
        assert record.targets_per_second is None
        assert not alive(pid)
        assert_works(launcher, request_for)
        assert starter_of(launcher) == starter

    def test_a_stopped_candidate_is_cut_too(
        self, launcher: Launcher, request_for: MakeRequest, clock: SkewedClock
    ) -> None:
        launcher.begin(request_for("hang", limit_seconds=1000))
        pid = step_until(launcher, "forked")["pid"]
        reach_windows(launcher)
        os.kill(pid, signal.SIGSTOP)
        clock.skew += 1000
        assert record_of(launcher.step()).fate is Fate.TIMED_OUT
        assert not alive(pid)

    def test_its_whole_process_group_goes(
        self, launcher: Launcher, request_for: MakeRequest, clock: SkewedClock
    ) -> None:
        launcher.begin(request_for("hang with a helper", limit_seconds=1000))
        pid = step_until(launcher, "forked")["pid"]
        assert step_until(launcher, "stage")["stage"] == "start"
        helper = int(step_until(launcher, "stage")["stage"])
        reach_windows(launcher)
        assert set(group(pid)) == {pid, helper}
        clock.skew += 1000
        assert record_of(launcher.step()).fate is Fate.TIMED_OUT
        assert ends(helper)
        assert group(pid) == []

    def test_what_it_said_before_the_cut_counts(
        self, launcher: Launcher, request_for: MakeRequest, clock: SkewedClock
    ) -> None:
        """The launcher may come late; the candidate did not."""
        launcher.begin(request_for("complete", limit_seconds=1000))
        pid = step_until(launcher, "forked")["pid"]
        assert ends(pid)
        clock.skew += 1000
        record = record_of(until_record(launcher))
        assert record.fate is Fate.COMPLETE
        assert len(record.windows) == 2
        assert_works(launcher, request_for)

    def test_a_candidate_that_hangs_in_its_exit_is_complete(
        self, launcher: Launcher, request_for: MakeRequest, clock: SkewedClock
    ) -> None:
        launcher.begin(request_for("hang in exit", limit_seconds=1000))
        pid = step_until(launcher, "forked")["pid"]
        step_until(launcher, "result")
        clock.skew += launcher_module._SECONDS_TO_END
        assert record_of(launcher.step()).fate is Fate.COMPLETE
        assert not alive(pid)
        assert_works(launcher, request_for)

    def test_the_limit_covers_the_starters_imports(
        self,
        launcher: Launcher,
        request_for: MakeRequest,
        clock: SkewedClock,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        os.mkfifo(tmp_path / "gate")
        monkeypatch.setenv("PRETEND_STARTER_GATE", str(tmp_path / "gate"))
        launcher.begin(request_for("complete", limit_seconds=1000))
        starter = starter_of(launcher)
        clock.skew += 1000
        record = record_of(launcher.step())
        assert (record.fate, record.reason) == (Fate.TIMED_OUT, "cut after 1000 s, during start")
        assert not alive(starter)
        monkeypatch.delenv("PRETEND_STARTER_GATE")
        assert_works(launcher, request_for)

    def test_a_starter_that_does_not_reap_is_replaced(
        self, launcher: Launcher, request_for: MakeRequest, clock: SkewedClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launcher_module, "_SECONDS_TO_END", 0.1)
        launcher.begin(request_for("hang", limit_seconds=1000))
        pid = step_until(launcher, "forked")["pid"]
        reach_windows(launcher)
        starter = starter_of(launcher)
        os.kill(starter, signal.SIGSTOP)
        clock.skew += 1000
        assert record_of(launcher.step()).fate is Fate.TIMED_OUT
        assert ends(pid)
        assert not alive(starter)
        monkeypatch.undo()


class TestStarter:
    def test_serves_one_candidate_after_the_other(self, launcher: Launcher, request_for: MakeRequest) -> None:
        seen = []
        for _ in range(2):
            launcher.begin(request_for("complete"))
            seen.append((starter_of(launcher), step_until(launcher, "forked")["pid"]))
            assert record_of(until_record(launcher)).fate is Fate.COMPLETE
        (starter, first), (again, second) = seen
        assert starter == again
        assert len({starter, first, second}) == 3

    def test_candidates_run_one_at_a_time(self, launcher: Launcher, request_for: MakeRequest) -> None:
        launcher.begin(request_for("hang"))
        with pytest.raises(AssertionError, match="one candidate at a time"):
            launcher.begin(request_for("complete"))

    def test_where_the_logs_folder_is_away_a_candidate_is_measured_without_its_log(
        self, launcher: Launcher, request_for: MakeRequest, tmp_path: Path
    ) -> None:
        launcher.run(request_for("complete"))
        (tmp_path / "logs").rename(tmp_path / "away")
        assert launcher.run(request_for("complete")).fate is Fate.COMPLETE
        launcher.close()
        assert launcher.run(request_for("complete")).fate is Fate.COMPLETE, "nor does another starter need it"

    def test_what_a_candidate_leaves_behind_goes_with_it(self, launcher: Launcher, request_for: MakeRequest) -> None:
        launcher.begin(request_for("leave a helper"))
        pid = step_until(launcher, "forked")["pid"]
        step_until(launcher, "stage")
        helper = int(step_until(launcher, "stage")["stage"])
        assert record_of(until_record(launcher)).fate is Fate.COMPLETE
        assert ends(helper)
        assert group(pid) == []

    @pytest.mark.parametrize(
        ("number", "fate", "reason"),
        [
            (signal.SIGKILL, Fate.FAILED, "the starter process ended; its log is starter.log"),
            (signal.SIGTERM, Fate.LOST, "ended by SIGTERM from outside during windows"),
        ],
    )
    def test_killed_it_takes_its_candidate_along_and_is_replaced(
        self, launcher: Launcher, request_for: MakeRequest, number: signal.Signals, fate: Fate, reason: str
    ) -> None:
        launcher.begin(request_for("hang with a helper"))
        pid = step_until(launcher, "forked")["pid"]
        reach_windows(launcher)
        helper = next(member for member in group(pid) if member != pid)
        starter = starter_of(launcher)
        os.kill(starter, number)
        record = record_of(launcher.step())
        assert (record.fate, record.reason) == (fate, reason)
        assert not Path(f"/proc/{starter}").exists(), "or the next candidate could be handed to a dying starter"
        assert len(record.windows) == 2
        assert ends(pid)
        assert ends(helper)
        assert_works(launcher, request_for)
        assert starter_of(launcher) != starter

    def test_killed_between_candidates_it_is_replaced(self, launcher: Launcher, request_for: MakeRequest) -> None:
        assert_works(launcher, request_for)
        starter = starter_of(launcher)
        os.kill(starter, signal.SIGKILL)
        assert ends(starter)
        assert_works(launcher, request_for)
        assert starter_of(launcher) != starter

    def test_gone_before_it_read_the_request(
        self, launcher: Launcher, request_for: MakeRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert_works(launcher, request_for)
        os.kill(starter_of(launcher), signal.SIGKILL)
        assert ends(starter_of(launcher))
        monkeypatch.setattr(launcher, "warm_up", lambda: None)  # it had just found the starter well
        launcher.begin(request_for("complete"))
        assert record_of(launcher.step()).fate is Fate.FAILED
        monkeypatch.undo()

    def test_warmed_up_it_is_the_one_that_serves(self, launcher: Launcher, request_for: MakeRequest) -> None:
        launcher.warm_up()
        starter = starter_of(launcher)
        launcher.warm_up()
        assert_works(launcher, request_for)
        assert starter_of(launcher) == starter

    def test_hears_nothing_of_the_terminals_ctrl_c(self, launcher: Launcher, request_for: MakeRequest) -> None:
        launcher.begin(request_for("hang"))
        pid = step_until(launcher, "forked")["pid"]
        assert os.getsid(starter_of(launcher)) == os.getsid(pid) != os.getsid(0)

    def test_has_the_compile_cache_in_its_environment(
        self, launcher: Launcher, request_for: MakeRequest, tmp_path: Path
    ) -> None:
        assert_works(launcher, request_for)
        entries = Path(f"/proc/{starter_of(launcher)}/environ").read_bytes().split(b"\0")
        assert f"TORCHINDUCTOR_CACHE_DIR={tmp_path / 'compile' / 'inductor'}".encode() in entries
        assert f"TRITON_CACHE_DIR={tmp_path / 'compile' / 'triton'}".encode() in entries


class TestEnd:
    def test_abandoning_ends_the_candidate_alone(self, launcher: Launcher, request_for: MakeRequest) -> None:
        launcher.warm_up()
        starter = starter_of(launcher)
        for _ in range(5):  # a process just forked, too
            launcher.begin(request_for("hang"))
            pid = step_until(launcher, "forked")["pid"]
            launcher.abandon()
            assert not alive(pid)
        launcher.abandon()
        assert_works(launcher, request_for)
        assert starter_of(launcher) == starter

    def test_closing_leaves_no_process(self, request_for: MakeRequest, tmp_path: Path, clock: SkewedClock) -> None:
        with build(tmp_path, clock) as launcher:
            launcher.begin(request_for("hang with a helper"))
            pid = step_until(launcher, "forked")["pid"]
            reach_windows(launcher)
            starter, members = starter_of(launcher), group(pid)
            assert len(members) == 2
        assert not alive(starter)
        assert all(map(ends, members))
        launcher.close()

    def test_closing_before_the_first_candidate_is_fine(self, tmp_path: Path, clock: SkewedClock) -> None:
        build(tmp_path, clock).close()

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_the_death_of_the_holder_leaves_no_process(
        self, request_for: MakeRequest, tmp_path: Path, number: signal.Signals
    ) -> None:
        """The holder is a Ray process, which Ray kills without a word."""
        command = [REAL_PYTHON, "-c", HOLDER, str(tmp_path), sys.executable]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.write(json.dumps(request_for("hang with a helper")) + "\n")
            holder.stdin.flush()
            assert select.select([holder.stdout], [], [], PATIENCE)[0]
            starter, candidate = map(int, holder.stdout.readline().split())
            members = group(candidate)
            assert len(members) == 2
            holder.send_signal(number)
            assert all(map(ends, [starter, *members]))


HOLDER = """
import json, sys
from pathlib import Path
from tinyllm_ray.train.launcher import Launcher

sys.executable = sys.argv[2]
launcher = Launcher(Path(sys.argv[1]), "", dict, {"sha256": "", "dirty": None})
launcher.begin(json.loads(sys.stdin.readline()))
while launcher.step()["event"] != "window":
    pass
print(launcher._starter.pid, launcher._candidate.pid, flush=True)
sys.stdin.read()
"""
