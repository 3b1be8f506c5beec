"""From the node-local journals to OUT, by helpers that may be those of killed sessions."""

import contextlib
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray import journal
from tinyllm_ray.tune import mirror
from tinyllm_ray.tune.mirror import MirroredJournal, all_records, await_earlier_helper, private_folder
from tinyllm_ray.tune.sessions import read_sessions


@pytest.fixture(autouse=True)
def node_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def numbers(path: Path) -> list[int]:
    return [entry["number"] for entry in journal.read_lines(path)]


def begin(out: Path, session: str) -> MirroredJournal:
    return MirroredJournal(private_folder(), "study", out, session, time.monotonic())


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.01)


def never() -> bool:
    return False


def test_a_killed_supervisors_helper_brings_its_records_and_its_seconds(out: Path) -> None:
    records = begin(out, "first")
    records.append([{"number": 1}])
    wait_until(lambda: bool(read_sessions(out)))
    assert records._helper.stdin is not None
    records._helper.stdin.close()  # as the kernel closes it
    assert records._helper.wait() == 0
    assert numbers(out / "trials.jsonl") == [1]
    assert list(private_folder().iterdir()) == []
    (session,) = read_sessions(out)
    assert session["session"] == "first"
    assert session["ended"] is False


def test_a_session_that_closes_says_so(out: Path) -> None:
    records = begin(out, "first")
    assert records.finish(1e9, never) is None
    assert [entry["ended"] for entry in read_sessions(out)] == [True]


def test_a_helper_waits_for_that_of_the_session_before(out: Path) -> None:
    """Which may be about to append the same lines: both would find them missing."""
    earlier = begin(out, "first")
    earlier.append([{"number": 1}])
    assert earlier.finish(1e9, never) is None
    folder = private_folder() / "study"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    records = begin(out, "second")
    records.append([{"number": 2}])
    assert records.finish(0.3, never) == "its file system does not answer"
    assert numbers(out / "trials.jsonl") == [1]
    os.close(descriptor)
    third = begin(out, "third")
    assert third.finish(1e9, never) is None
    assert numbers(out / "trials.jsonl") == [1, 2]


def test_a_helper_that_comes_late_leaves_a_running_sessions_journal_alone(out: Path) -> None:
    """It would remove a file that a record is being written to."""
    live = private_folder() / "study" / "second.jsonl"
    held = mirror._hold(live)
    journal.append_line(live, {"number": 2})
    late = begin(out, "first")
    late.append([{"number": 1}])
    assert late.finish(1e9, never) is None
    assert numbers(out / "trials.jsonl") == [1]
    assert numbers(live) == [2]
    held.close()  # as the kernel closes it
    assert begin(out, "third").finish(1e9, never) is None
    assert numbers(out / "trials.jsonl") == [1, 2]


def test_a_helper_whose_journal_another_one_has_brought_ends_well(out: Path) -> None:
    late = begin(out, "first")
    late.append([{"number": 1}])
    wait_until(lambda: (out / "trials.jsonl").exists() and numbers(out / "trials.jsonl") == [1])
    late.path.unlink()
    assert late.finish(1e9, never) is None
    assert numbers(out / "trials.jsonl") == [1]


def test_a_helper_that_waits_for_its_turn_sees_its_session_end(tmp_path: Path) -> None:
    """The wait is on nobody's account: it may be as long as the next session."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    looked = []

    class Supervisor(mirror._Stdin):
        def look(self, seconds: float) -> None:
            looked.append(seconds)
            if len(looked) == 3:
                os.close(descriptor)

    mirror._take_turn(tmp_path, Supervisor())
    assert len(looked) >= 3


def test_a_journal_that_is_removed_while_it_is_made_is_made_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the helper of an earlier session, which takes an empty file that nobody holds for one that was left."""
    path = private_folder() / "study" / "second.jsonl"
    lock, removed = fcntl.flock, []

    def remove_first(file: Any, operation: int) -> None:
        if not removed:
            removed.append(path)
            path.unlink()
        lock(file, operation)

    monkeypatch.setattr(mirror.fcntl, "flock", remove_first)
    with mirror._hold(path) as held:
        assert path.stat().st_ino == os.fstat(held.fileno()).st_ino


def test_a_session_waits_for_the_helper_of_the_one_before(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await_earlier_helper("study")  # there is none
    folder = private_folder() / "study"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        os.close(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(mirror.time, "sleep", sleep)
        await_earlier_helper("study", patience_seconds=1e9)
    assert len(slept) == 1


@pytest.mark.parametrize("moment", ["before a record", "at the end"])
def test_a_helper_that_was_killed_is_started_again(out: Path, moment: str) -> None:
    records = begin(out, "first")
    records.append([{"number": 1}])
    if moment == "at the end":
        records.append([{"number": 2}])
    os.kill(records._helper.pid, signal.SIGKILL)
    records._helper.wait()
    if moment == "before a record":
        records.append([{"number": 2}])
    assert records.finish(1e9, never) is None
    assert numbers(out / "trials.jsonl") == [1, 2]
    assert list(private_folder().iterdir()) == []


def test_a_helper_lets_pass_what_slurm_sends_to_every_process(out: Path) -> None:
    records = begin(out, "first")
    helper = records._helper
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(helper.pid, number)
    records.append([{"number": 1}])
    assert records.finish(1e9, never) is None
    assert (records._helper, helper.returncode) == (helper, 0)


def test_a_session_that_closes_before_others_is_charged_to_that_moment(out: Path) -> None:
    """One of several studies in turn: what the others take is not its own."""
    records = begin(out, "first")
    records.append([{"number": 1}])
    records.close()
    assert records._helper.wait() == 0
    charged = (out / "sessions" / "first.json").read_bytes()
    assert records.finish(1e9, never) is None
    assert (out / "sessions" / "first.json").read_bytes() == charged


def test_what_a_killed_helper_left_unfinished_is_removed(out: Path) -> None:
    (out / "sessions").mkdir()
    left = out / "sessions" / ".first.json.0123456789abcdef.tmp"
    left.touch()
    assert begin(out, "second").finish(1e9, never) is None
    assert not left.exists()


def test_a_record_that_is_brought_while_one_looks_counts_once(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder() / "study"
    folder.mkdir()
    journal.append_lines(out / "trials.jsonl", [{"number": 1}])
    journal.append_lines(folder / "first.jsonl", [{"number": 1}, {"number": 2}])
    read = journal.read_lines

    def read_and_bring(path: Path) -> list[dict]:
        """Between this look and the next one the helper has done its work."""
        found = read(path)
        with contextlib.suppress(FileNotFoundError):
            (folder / "first.jsonl").unlink()
            journal.append_lines(out / "trials.jsonl", [{"number": 2}])
        return found

    monkeypatch.setattr(mirror.journal, "read_lines", read_and_bring)
    assert all_records("study", out) == [{"number": 1}, {"number": 2}]
