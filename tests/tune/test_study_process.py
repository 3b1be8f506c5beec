"""The study's process keeps listening, whatever the libraries in it do."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from tinyllm_ray.tune import study_process, tasks


class Line:
    alone = False
    request = {"budget": "1h", "budget_seconds": 3600.0}

    def send(self, *said, **values):
        pass


def heard():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    return int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1


def run(work):
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    while not heard():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()


study_process.attach = Line
tasks.run = run
sys.exit(study_process.main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_signal_is_heard_where_a_library_has_put_another_handler_in_its_place() -> None:
    """Ray's, for one, is compiled code's own, prints addresses, and is there from `ray.init` on."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (3, "ended by SIGTERM before anything was measured\n")
