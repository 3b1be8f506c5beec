"""The study's process keeps listening, whatever the libraries in it do."""

import errno
import os
import subprocess
import sys

import pytest

from tinyllm_ray.tune import study_process, tasks
from tinyllm_ray.tune.channel import Channel

BEGIN = """
import ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path
from tinyllm_ray.tune import study_process, tasks


class Line:
    alone = False
    request = {"budget": "1h", "budget_seconds": 3600.0}

    def send(self, *said, **values):
        pass
"""

PROGRAM = """
def heard():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    return int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1


def run(work):
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    while not heard():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
"""

WARNED = """
def run(work):
    for number in (signal.SIGUSR1, signal.SIGHUP):
        os.kill(os.getpid(), number)
        command = "import os; os.kill(os.getpid(), " + str(int(number)) + ")"
        subprocess.run([sys.executable, "-c", command], check=True)
    return 0
"""

END = """
study_process.attach = Line
tasks.run = run
sys.exit(study_process.main())
"""


def run(program: str) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", BEGIN + program + END]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_signal_is_heard_where_a_library_has_put_another_handler_in_its_place() -> None:
    """Ray's, for one, is compiled code's own, prints addresses, and is there from `ray.init` on."""
    assert run(PROGRAM) == (3, "ended by SIGTERM before anything was measured\n")


def test_what_slurm_sends_to_every_process_before_the_limit_is_the_supervisors_to_answer() -> None:
    """Where the command runs in a step, `--signal=USR1@60` is for all that is in it: Ray's processes and candidates."""
    assert run(WARNED) == (0, "")


def test_a_path_that_cannot_be_used_is_a_mistake_until_there_is_a_study(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(work: study_process.Work) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "closed/study")

    monkeypatch.setattr(tasks, "run", refuse)
    for session, verdict, told in (
        (None, (2, "closed/study: permission denied; choose another, or have it opened to you"), ""),
        (object(), (1, "PermissionError: [Errno 13] Permission denied: 'closed/study'"), "Traceback"),
    ):
        work = study_process.Work(Channel({}, -1))
        work.session = session  # type: ignore[assignment]
        work.thread.start()
        work.thread.join()
        assert work.verdict == verdict
        assert capsys.readouterr().err.startswith(told)
