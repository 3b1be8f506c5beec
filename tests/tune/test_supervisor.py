"""The supervisor against children that misbehave: real processes, real signals, real time."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinyllm_ray
from tinyllm_ray import journal
from tinyllm_ray.clock import Deadline
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.tune import mirror, supervisor
from tinyllm_ray.tune.channel import Channel
from tinyllm_ray.tune.child import start_child
from tinyllm_ray.tune.mirror import MirroredJournal, all_records, private_folder
from tinyllm_ray.tune.processes import STUDY_VARIABLE, end_processes
from tinyllm_ray.tune.supervisor import Outcome, process_age_seconds, supervise

ROOT = str(Path(tinyllm_ray.__file__).parents[1])
LATE_SECONDS = 2.0
"""The promise: never longer than this past the deadline."""

PREAMBLE = f"""
import os, signal, subprocess, sys, time
sys.path.insert(0, {ROOT!r})
from tinyllm_ray.tune.channel import attach
channel = attach()
out = channel.request.get("out")
def ready():
    open(channel.request["ready"], "w").close()
def begin():
    channel.send("out", study="study", path=out)
def record(number):
    channel.send("record", record={{"number": number}})
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
HANG = DEAF + "ready()\ntime.sleep(600)\n"
# No signal handler and no other thread of Python runs while the matcher backtracks: 2**60 steps.
HANG_IN_C = "import re\nready()\nre.fullmatch('(a|a)*b', 'a' * 60)\n"


@pytest.fixture(autouse=True)
def node_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node-local disk of one test."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder / f"tinyllm_ray-{os.getuid()}"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def tag(tmp_path: Path) -> Iterator[str]:
    """An argument by which the processes of one test can be told from all others; what a failed test left is killed."""
    tag = f"tag={tmp_path}"
    yield tag
    for pid in running(tag):
        os.kill(int(pid), signal.SIGKILL)


def child(body: str, tag: str = "") -> list[str]:
    return [sys.executable, "-c", PREAMBLE + textwrap.dedent(body), tag]


def run(body: str, *, budget: float = 30.0, passed: float = 0.0, tag: str = "", **request: Any) -> Outcome:
    """Supervise a child with this body, and hold the promise about the deadline whatever it does.

    Where the body says `ready()`, the clock stands still until then, so that a slow machine changes nothing; then
    `passed` seconds of the budget are over.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        began: list[float] = [] if "ready()" in body else [time.monotonic()]

        def clock() -> float:
            if not began and ready.exists():
                began.append(time.monotonic() - passed)
            return time.monotonic() - began[0] if began else 0.0

        deadline = Deadline.after(budget, clock)
        outcome = supervise(child(body, tag), request={**request, "ready": str(ready)}, deadline=deadline)
        assert deadline.remaining() > -LATE_SECONDS
        return outcome


def running(tag: str) -> list[str]:
    """Command lines of processes with `tag` among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if tag in words:
                found.append(entry.name)
    return found


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def numbers(path: Path) -> list[int]:
    return [entry["number"] for entry in journal.read_lines(path)]


def test_a_study_that_ends_by_itself(out: Path, node_local: Path) -> None:
    began = time.monotonic()
    outcome = run("begin(); record(1); record(2); channel.send('done', exit_status=0)", out=str(out))
    assert (outcome.exit_status, outcome.cut, outcome.survivors, outcome.mirrored) == (0, False, (), True)
    assert outcome.message is None
    assert outcome.journal == out / "trials.jsonl"
    assert numbers(out / "trials.jsonl") == [1, 2]
    assert list(node_local.iterdir()) == []
    assert 0 < outcome.elapsed_seconds < time.monotonic() - began


def test_the_request_arrives_with_the_seconds_left(out: Path) -> None:
    body = """
    import json
    with open(out + "/asked.json", "w") as file:
        json.dump([channel.request, os.environ.get("TINYLLM_RAY_CHANNEL"), os.environ["TINYLLM_RAY_STUDY"]], file)
    ready()
    """
    long_text = "x" * 1_000_000  # more than any pipe holds
    assert run(body, budget=40, out=str(out), preset="nano", text=long_text).exit_status == 0
    request, channel, marker = json.loads((out / "asked.json").read_text())
    assert request.pop("budget_seconds") == pytest.approx(36)  # a tenth is the grace
    assert request.pop("ready")
    assert request == {"out": str(out), "preset": "nano", "text": long_text}
    assert channel is None
    assert marker


@pytest.mark.parametrize("status", [0, 1, 2, 3])
def test_exit_statuses_pass_through(status: int) -> None:
    assert run(f"sys.exit({status})").exit_status == status


def test_the_verdict_counts_more_than_the_end() -> None:
    """A crash of some library's clean-up after the report was written changes no result."""
    outcome = run("channel.send('done', exit_status=3, message='why'); os.kill(os.getpid(), signal.SIGSEGV)")
    assert (outcome.exit_status, outcome.message) == (3, "why")


def test_the_first_verdict_counts() -> None:
    """The second one is about the clean-up after it, a Ray shutdown that raised for one."""
    outcome = run("channel.send('done', exit_status=0); channel.send('done', exit_status=1, message='why')")
    assert (outcome.exit_status, outcome.message) == (0, None)


def test_a_study_that_does_not_end_after_its_verdict(monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    monkeypatch.setattr(supervisor, "DONE_SECONDS", 0.3)
    outcome = run("channel.send('done', exit_status=0)\n" + HANG, tag=tag)
    assert (outcome.exit_status, outcome.cut) == (0, False)
    assert running(tag) == []


@pytest.mark.parametrize("hang", [HANG, HANG_IN_C], ids=["deaf", "in C"])
def test_a_hanging_study_is_cut(hang: str, out: Path, tag: str, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run("begin(); record(1)\n" + hang, budget=1, out=str(out), tag=tag)
    assert (outcome.exit_status, outcome.cut, outcome.survivors) == (3, True, ())
    assert numbers(out / "trials.jsonl") == [1]
    assert running(tag) == []
    assert f"ended at the deadline; its records are in {out}/trials.jsonl" in capfd.readouterr().err


def test_a_terminal_that_takes_nothing_holds_nobody_up(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that Ctrl-S has stopped; here a pipe that is full and read by nobody."""
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as full:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writing, b"." * 4096)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", full)
            outcome = run("begin()\n" + HANG, budget=1, out=str(out))
    assert (outcome.exit_status, outcome.cut) == (3, True)
    assert "ended at the deadline" in (outcome.message or "")


def test_a_cut_study_whose_report_stands(out: Path) -> None:
    outcome = run("begin(); record(1); channel.send('standing', exit_status=0)\n" + HANG, budget=1, out=str(out))
    assert (outcome.exit_status, outcome.cut) == (0, True)


def test_a_study_has_the_grace_for_its_last_summary(out: Path) -> None:
    body = """
    def end(number, frame):
        raise SystemExit
    signal.signal(signal.SIGTERM, end)
    begin()
    ready()
    try:
        time.sleep(600)
    finally:
        time.sleep(0.1)
        record(7)
        channel.send("done", exit_status=0)
    """
    outcome = run(body, budget=100, passed=88, out=str(out))
    assert (outcome.exit_status, outcome.cut) == (0, True)
    assert numbers(out / "trials.jsonl") == [7]


def test_no_time_left_at_all() -> None:
    assert run("time.sleep(600)", budget=0).exit_status == 3


def test_a_study_that_was_killed(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run("begin(); record(1); os.kill(os.getpid(), signal.SIGKILL)", out=str(out))
    assert (outcome.exit_status, outcome.cut) == (1, False)
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"tinyllm_ray: {outcome.message}"
    assert "died by SIGKILL" in line
    assert str(out / "trials.jsonl") in line


GRANDCHILD = """
def spawn(code, **options):
    reading, writing = os.pipe()
    code = f"import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write({writing}, b'x'); " + code
    process = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], pass_fds=[writing], **options)
    os.read(reading, 1)
    return process
"""
# Ray's agents do this to themselves, by way of their title.
FORGET_THE_MARKER = (
    "import ctypes; libc = ctypes.CDLL(None); environ = ctypes.c_void_p.in_dll(libc, 'environ').value; "
    "first = ctypes.cast(environ, ctypes.POINTER(ctypes.c_void_p))[0]; "
    "size = len(open('/proc/self/environ', 'rb').read()); ctypes.memset(first, 0, size); "
)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("time.sleep(600)", "start_new_session=True"),
        ("time.sleep(600)", "process_group=0"),
        (FORGET_THE_MARKER + "time.sleep(600)", "process_group=0"),
    ],
    ids=["session of its own", "group of its own", "group of its own, marker overwritten"],
)
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)", HANG], ids=["ends", "killed", "hangs"])
def test_nothing_outlives_a_study(code: str, options: str, end: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LEFTOVER_SECONDS", 0.2)
    body = GRANDCHILD + f"spawn({code!r}, {options})\n" + end
    outcome = run(body, budget=1 if end == HANG else 30.0, tag=tag)
    assert outcome.survivors == ()
    assert running(tag) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_descendants_of_a_marked_process_are_found(tag: str) -> None:
    """A session of its own and no marker, but its parent is the study's."""
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]], "
    )
    code += "env={}, start_new_session=True)"
    body = f"process = subprocess.Popen([sys.executable, '-c', {code!r}, sys.argv[1]], start_new_session=True)\n" + HANG
    outcome = run(body, budget=1, tag=tag)
    assert outcome.survivors == ()
    assert running(tag) == []


def test_processes_that_are_ending_are_left_to_it(out: Path) -> None:
    """A clean end takes a moment; killing it would lose what it still writes."""
    code = f"time.sleep(0.5); open({str(out / 'written')!r}, 'w').close()"
    outcome = run(GRANDCHILD + f"spawn({code!r}, start_new_session=True)", tag="tag")
    assert outcome.survivors == ()
    assert (out / "written").exists()


def test_processes_of_others_are_left_alone(tag: str) -> None:
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, STUDY_VARIABLE: "another"}
    )
    try:
        run("", tag=tag)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_process_that_cannot_be_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in the kernel for a dead driver takes no signal; here the signals are not sent."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, STUDY_VARIABLE: "stuck"}
    )
    try:
        assert wait_until(lambda: bool(end_processes("stuck", None, patience_seconds=9, limit_seconds=0)))
        monkeypatch.setattr(os, "kill", lambda pid, number: None)
        begin = time.monotonic()
        (name,) = end_processes("stuck", None, patience_seconds=0, limit_seconds=0.3)
        assert time.monotonic() - begin >= 0.3  # and not for ever
        assert name.endswith(f"(process {process.pid})")
    finally:
        monkeypatch.undo()
        process.kill()
        process.wait()


def test_studies_that_follow_each_other_have_their_records_in_folders_of_their_own(out: Path, node_local: Path) -> None:
    """Sent in one breath, so that the supervisor reads them together."""
    body = """
    import json
    def line(kind, **fields):
        return json.dumps({"type": kind, **fields}) + "\\n"
    messages = ""
    for study in ("first", "second", "third"):
        os.mkdir(out + "/" + study)
        messages += line("out", study=study, path=out + "/" + study)
        messages += "".join(line("record", number=number, record={"number": number}) for number in range(len(study)))
    os.write(channel._descriptor, messages.encode())
    channel.send("done", exit_status=0)
    """
    outcome = run(body, out=str(out))
    assert (outcome.exit_status, outcome.mirrored) == (0, True)
    assert outcome.journal == out / "third" / "trials.jsonl"
    for study in ("first", "second", "third"):
        assert numbers(out / study / "trials.jsonl") == list(range(len(study)))
    assert list(node_local.iterdir()) == []


def test_one_folder_of_several_that_is_gone_keeps_its_records_here_and_is_named(
    out: Path, node_local: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
    import shutil
    for study in ("first", "second"):
        os.mkdir(out + "/" + study)
    os.rmdir(out + "/first")
    for number, study in enumerate(("first", "second")):
        channel.send("out", study=study, path=out + "/" + study)
        record(number)
    channel.send("done", exit_status=0)
    """
    outcome = run(body, out=str(out))
    assert (outcome.exit_status, outcome.mirrored) == (0, False)
    assert outcome.journal is not None
    assert outcome.journal.parent == node_local / "first"
    assert numbers(outcome.journal) == [0]
    assert numbers(out / "second" / "trials.jsonl") == [1]
    assert f"{out / 'first' / 'trials.jsonl'} lags behind" in capfd.readouterr().err


def test_a_flood_of_records_survives_a_kill(out: Path) -> None:
    """None lost, none twice: every record whose sending returned is there, in order."""
    body = """
    begin()
    for number in range(500):
        record(number)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    outcome = run(body, out=str(out))
    assert outcome.exit_status == 1
    assert numbers(out / "trials.jsonl") == list(range(500))


def test_a_record_is_on_both_disks_before_the_study_ends(out: Path) -> None:
    body = """
    begin()
    record(1)
    (local,) = os.scandir(os.environ["TMPDIR"] + f"/tinyllm_ray-{os.getuid()}/study")
    while not all(os.path.exists(path) and os.path.getsize(path) for path in (local.path, out + "/trials.jsonl")):
        time.sleep(0.02)
    """
    assert run(body, out=str(out)).exit_status == 0


def test_a_torn_message_is_left_out_and_the_next_ones_count(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
    begin()
    os.write(channel._descriptor, b'{"type": "rec')
    channel._torn = True
    record(2)
    os.write(channel._descriptor, b'{"type": "record", "record": {"number": 3}')
    """
    assert run(body, out=str(out)).exit_status == 0
    assert numbers(out / "trials.jsonl") == [2]
    assert "torn" in capfd.readouterr().err


def test_messages_from_many_threads_stay_whole(out: Path) -> None:
    body = """
    import threading
    begin()
    def send(start):
        for number in range(start, start + 100):
            channel.send("record", record={"number": number, "text": "x" * 5000})
    threads = [threading.Thread(target=send, args=(100 * index,)) for index in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    """
    assert run(body, out=str(out)).exit_status == 0
    assert sorted(numbers(out / "trials.jsonl")) == list(range(400))


def test_an_unknown_message_is_our_fault_and_leaves_no_process(tag: str) -> None:
    with pytest.raises(AssertionError, match="unknown message"):
        run("channel.send('recrod')\n" + HANG, tag=tag)
    assert running(tag) == []


def test_an_out_folder_that_hangs(out: Path, node_local: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Reading a FIFO that nobody writes to blocks like a dead file system."""
    os.mkfifo(out / "trials.jsonl")
    outcome = run("begin(); record(1)\n" + HANG, budget=1, out=str(out))
    assert (outcome.mirrored, outcome.cut) == (False, True)
    assert outcome.journal is not None
    assert outcome.journal.parent == node_local / "study"
    assert numbers(outcome.journal) == [1]
    said = capfd.readouterr().err
    assert "does not answer" in said
    assert str(outcome.journal) in said


def test_a_cut_study_without_a_standard_error_ends_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    outcome = run(HANG, budget=0.1)
    assert (outcome.exit_status, outcome.cut) == (3, True)


def test_out_folders_that_hang_are_waited_for_together(
    out: Path, node_local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen studies that share a budget: a little time for each would be too much for all."""
    patience = []

    class Watched(MirroredJournal):
        def finish(self, seconds: float, hurry: Callable[[], bool]) -> str | None:
            patience.append(seconds)
            return super().finish(seconds, hurry)

    monkeypatch.setattr(supervisor, "MirroredJournal", Watched)
    body = """
    for number, study in enumerate(("first", "second", "third")):
        os.mkdir(out + "/" + study)
        os.mkfifo(out + "/" + study + "/trials.jsonl")
        channel.send("out", study=study, path=out + "/" + study)
        record(number)
    """
    outcome = run(textwrap.dedent(body) + HANG, budget=0.1, out=str(out), presets=["first", "second", "third"])
    assert (outcome.mirrored, outcome.cut) == (False, True)
    assert patience[1:3] == [0.0, 0.0], "the first had all there was"


def test_an_out_folder_that_is_gone(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run("begin(); os.rmdir(out); record(1)", out=str(out))
    assert (outcome.exit_status, outcome.mirrored) == (0, False)
    assert outcome.journal is not None
    assert numbers(outcome.journal) == [1]
    assert "No such file" in capfd.readouterr().err


def test_an_out_folder_that_comes_back(out: Path) -> None:
    body = """
    begin()
    record(1)
    while not os.path.exists(out + "/trials.jsonl"):
        time.sleep(0.02)
    os.rename(out, out + "-away")
    record(2)
    time.sleep(1)
    os.rename(out + "-away", out)
    record(3)
    """
    assert run(body, out=str(out)).mirrored
    assert numbers(out / "trials.jsonl") == [1, 2, 3]


def test_resuming_goes_on_after_the_lines_of_out(out: Path) -> None:
    (out / "trials.jsonl").write_bytes(b'{"number":1}\n{"number":2}\n{"torn":')
    assert run("begin(); record(3)", out=str(out)).mirrored
    assert numbers(out / "trials.jsonl") == [1, 2, 3]


def test_resuming_brings_what_the_last_run_could_not(out: Path, tmp_path: Path) -> None:
    records = MirroredJournal(private_folder(), "study", tmp_path / "absent", "before", time.monotonic())
    records.append([{"number": 1}, {"number": 2}])
    assert "No such file" in (records.finish(60, lambda: False) or "")
    journal.append_line(out / "trials.jsonl", {"number": 1})
    assert all_records("study", out) == [{"number": 1}, {"number": 2}]
    assert run("begin(); record(3)", out=str(out)).mirrored
    assert numbers(out / "trials.jsonl") == [1, 2, 3]
    assert list(private_folder().iterdir()) == []


def test_where_the_disk_is_full_the_journal_goes_on_in_memory(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    disk, append = private_folder(), journal.append_lines

    def full(path: Path, entries: Iterable[dict[str, Any]]) -> None:
        if path.is_relative_to(disk):
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, entries)

    records = MirroredJournal(disk, "study", out, "now", time.monotonic())
    records.append([{"number": 1}])
    with monkeypatch.context() as patch:
        patch.setattr(journal, "append_lines", full)
        records.append([{"number": 2}])
        records.append([{"number": 3}])
        assert records.path.is_relative_to(tmp_path / "memory")
        # As after a crash: the next session finds them there.
        assert all_records("study", tmp_path / "empty") == [{"number": number} for number in (1, 2, 3)]
    assert records.finish(60, lambda: False) is None
    assert numbers(out / "trials.jsonl") == [1, 2, 3]
    assert all_records("study", tmp_path / "empty") == []
    assert list((tmp_path / "memory" / disk.name).iterdir()) == []


@pytest.mark.skipif(not mirror.MEMORY.is_dir(), reason="needs /dev/shm")
def test_records_left_in_memory_are_brought_by_the_next_session(out: Path) -> None:
    """In the real place: the copying process has modules of its own."""
    study = f"study-{os.getpid()}-{time.time_ns()}"
    left = mirror.MEMORY / private_folder().name / study / "before.jsonl"
    left.parent.mkdir(parents=True)
    journal.append_lines(left, [{"number": 1}, {"number": 2}])
    records = MirroredJournal(private_folder(), study, out, "now", time.monotonic())
    records.append([{"number": 3}])
    assert records.finish(60, lambda: False) is None
    assert sorted(numbers(out / "trials.jsonl")) == [1, 2, 3]
    assert not left.parent.exists()


def test_the_journal_folder_must_be_ours(node_local: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    node_local.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="TMPDIR"):
        run("")
    node_local.unlink()
    node_local.mkdir(mode=0o777)
    node_local.chmod(0o777)
    assert run("").exit_status == 0
    assert node_local.stat().st_mode & 0o777 == 0o700


def test_off_the_main_thread(out: Path) -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run("begin(); record(1)", out=str(out))))
    thread.start()
    thread.join()
    assert outcomes[0].exit_status == 0
    assert numbers(out / "trials.jsonl") == [1]


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run("")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


SUPERVISING = f"""
import json, signal, sys
sys.path.insert(0, {ROOT!r})
signal.signal(signal.SIGINT, signal.default_int_handler)
from tinyllm_ray.clock import Deadline
from tinyllm_ray.tune.supervisor import supervise
command, request, grace_seconds = map(json.loads, sys.argv[1:])
outcome = supervise(command, request=request, deadline=Deadline.after(1000), grace_seconds=grace_seconds)
print(json.dumps([outcome.exit_status, outcome.cut, list(outcome.survivors)]))
sys.exit(outcome.exit_status)
"""


class Supervising:
    """A supervisor in a process of its own, to send signals to."""

    def __init__(self, body: str, tag: str, out: Path, grace_seconds: float, more: dict[str, Any]) -> None:
        self._ready = out / "ready"
        request = {"out": str(out), "ready": str(self._ready), **more}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISING, json.dumps(child(body, tag)), json.dumps(request), str(grace_seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def signal(self, number: int) -> None:
        assert wait_until(self._ready.exists)
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=240)
        return self.process.returncode, output


@pytest.fixture
def supervising(tag: str, out: Path) -> Iterator[Callable[..., Supervising]]:
    started: list[Supervising] = []

    def start(body: str, grace_seconds: float = 20.0, **more: Any) -> Supervising:
        started.append(Supervising(body, tag, out, grace_seconds, more))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


@pytest.mark.parametrize(
    ("number", "heard", "status"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGUSR1, signal.SIGTERM, 143),
        (signal.SIGHUP, signal.SIGTERM, 143),
    ],
)
def test_the_first_signal_asks_for_a_clean_end(
    number: int, heard: int, status: int, supervising: Callable[..., Supervising], out: Path, tag: str
) -> None:
    body = f"""
    def end(number, frame):
        record(number)
        channel.send("done", exit_status=0)
        sys.exit(0)
    signal.signal({int(heard)}, end)
    begin()
    ready()
    time.sleep(600)
    """
    one = supervising(body)
    one.signal(number)
    assert one.end() == (status, f"[{status}, false, []]\n")
    assert numbers(out / "trials.jsonl") == [heard]
    assert running(tag) == []


def test_the_second_signal_kills_at_once(supervising: Callable[..., Supervising], tag: str, out: Path) -> None:
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda number, frame: open(out + "/asked", "w").close())
    ready()
    while True:
        time.sleep(600)
    """
    one = supervising(body, grace_seconds=1000)  # which it does not wait for
    one.signal(signal.SIGINT)
    assert wait_until((out / "asked").exists)
    one.signal(signal.SIGTERM)  # another one; the same within a second would be the same wish
    assert one.end()[0] == 130
    assert running(tag) == []


def test_a_signal_while_the_child_starts_waits_for_its_handlers(tmp_path: Path) -> None:
    """Ctrl-C just after the command has begun: Python's own handler would end the child with a traceback."""
    code = f"""
import os, signal, sys, time
sys.path.insert(0, {ROOT!r})
from tinyllm_ray.tune.channel import attach
open({str(tmp_path / "starting")!r}, "w").close()
while not os.path.exists({str(tmp_path / "sent")!r}):
    time.sleep(0.01)
signal.signal(signal.SIGINT, lambda number, frame: sys.exit(7))
attach()
sys.exit(8)
"""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child, lines = start_child([sys.executable, "-c", code], {}, 60.0, "starting")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert wait_until((tmp_path / "starting").exists)
    child.send_signal(signal.SIGINT)
    (tmp_path / "sent").touch()
    assert child.wait() == 7
    lines.close()


def test_a_child_deaf_to_the_signal_is_killed(supervising: Callable[..., Supervising], tag: str) -> None:
    one = supervising("signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\ntime.sleep(600)", grace_seconds=0.5)
    one.signal(signal.SIGINT)
    assert one.end()[0] == 130
    assert running(tag) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_supervisor_leaves_no_process_and_no_record_behind(
    supervising: Callable[..., Supervising], tag: str, out: Path
) -> None:
    body = GRANDCHILD + DEAF + "begin(); record(1); spawn('time.sleep(600)', start_new_session=True)\n"
    body += "time.sleep(0.5)\nready()\ntime.sleep(600)"
    one = supervising(body)
    one.signal(signal.SIGKILL)
    assert one.process.wait() == -signal.SIGKILL
    assert wait_until(lambda: not running(tag))
    assert wait_until(lambda: numbers(out / "trials.jsonl") == [1])


def test_the_age_counts_from_the_process_start() -> None:
    code = f"import sys, time; time.sleep(0.5); sys.path.insert(0, {ROOT!r})\n"
    code += "from tinyllm_ray.tune.supervisor import process_age_seconds as age; print(age())"
    begin = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert 0.5 <= age <= time.monotonic() - begin + 0.02


def test_the_age_of_a_shell_that_became_python_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_IMPORTED_AT", time.monotonic() - 2)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: 1e9)
    assert process_age_seconds() == pytest.approx(2, abs=0.5)


def test_a_record_is_on_the_disk_when_its_sending_returns(out: Path) -> None:
    """What others are told of it then cannot be lost with the supervisor."""
    body = """
    begin()
    for number in range(50):
        record(number)
        (local,) = os.scandir(os.environ["TMPDIR"] + f"/tinyllm_ray-{os.getuid()}/study")
        with open(local.path) as file:
            assert len(file.readlines()) == number + 1
    """
    assert run(body, out=str(out)).exit_status == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_supervisors_session_is_charged_to_the_moment_it_was_killed(
    supervising: Callable[..., Supervising], tag: str, out: Path
) -> None:
    body = DEAF + "begin(); record(1)\n" + "while not os.path.exists(out + '/sessions'): time.sleep(0.01)\n"
    body += "ready()\ntime.sleep(600)"
    began = time.monotonic()
    one = supervising(body)
    assert wait_until(one._ready.exists, seconds=1e9)
    ready = time.monotonic()
    time.sleep(1)  # spent: the next sign of life is 5 s after the first
    least = time.monotonic() - ready
    one.signal(signal.SIGKILL)
    one.process.wait()
    folder = out / "sessions"
    assert wait_until(lambda: not list(Path(tempfile.gettempdir()).glob("tinyllm_ray-*/study")), seconds=1e9)
    (path,) = folder.iterdir()
    session = json.loads(path.read_bytes())
    assert least <= session["seconds"] <= time.monotonic() - began
    assert session["ended"] is False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_where_studies_share_a_budget_the_whole_is_charged_to_the_moment_it_was_killed(
    supervising: Callable[..., Supervising], tag: str, out: Path
) -> None:
    body = """
    for number, study in enumerate(("first", "second")):
        os.mkdir(out + "/" + study)
        channel.send("out", study=study, path=out + "/" + study)
        record(number)
    while not (os.path.exists(out + "/sessions") and os.path.exists(out + "/second/sessions")): time.sleep(0.01)
    ready()
    time.sleep(600)
    """
    began = time.monotonic()
    one = supervising(DEAF + textwrap.dedent(body), age_seconds=40.0, presets=["first", "second"])
    assert wait_until(one._ready.exists, seconds=1e9)
    one.signal(signal.SIGKILL)
    one.process.wait()
    assert wait_until(lambda: not list(Path(tempfile.gettempdir()).glob("tinyllm_ray-*/*")), seconds=1e9)
    (whole,), (first,), (second,) = (
        [json.loads(path.read_bytes()) for path in (folder / "sessions").iterdir()]
        for folder in (out, out / "first", out / "second")
    )
    assert 40 <= whole["seconds"] <= 40 + time.monotonic() - began, "what came before the first study counts too"
    assert max(first["seconds"], second["seconds"]) <= whole["seconds"] - 40, "each from its own begin"
    assert (whole["ended"], first["ended"], second["ended"]) == (False, True, False)
    assert not (out / "trials.jsonl").exists()


def test_a_study_notices_that_its_supervisor_is_gone() -> None:
    reading, writing = os.pipe()
    answers, answering = os.pipe()
    channel = Channel({}, writing, answers)
    assert not channel.alone
    os.close(reading)
    assert channel.alone
    os.close(answering)
    with pytest.raises(BrokenPipeError):
        channel.send("record", record={})
    os.close(writing)
    os.close(answers)


def test_a_supervisor_that_dies_before_it_answers_is_gone() -> None:
    reading, writing = os.pipe()
    answers, answering = os.pipe()
    os.close(answering)
    with pytest.raises(BrokenPipeError, match="the supervisor is gone"):
        Channel({}, writing, answers).send("record", record={})
    for descriptor in (reading, writing, answers):
        os.close(descriptor)
