"""Lines of a command that standard output does not take as they are."""

import os
import subprocess
import sys

import pytest

SAID = """
import sys
from tinyllm_ray.command import exit_status, say
sys.exit(exit_status(lambda: say("runs/ü€ is done") or 0))
"""


@pytest.mark.parametrize(
    ("encoding", "line"),
    [
        ("ascii", b"runs/\\xfc\\u20ac is done"),
        ("iso-8859-1", b"runs/\xfc\\u20ac is done"),
        ("utf-8", "runs/ü€ is done".encode()),
        ("ascii:replace", b"runs/?? is done"),
    ],
)
def test_what_the_encoding_of_the_output_lacks_costs_no_command(encoding: str, line: bytes) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", SAID], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, line + b"\n", b"")


MISTAKEN = """
import sys
from tinyllm_ray.command import exit_status
from tinyllm_ray.errors import ConfigError

def mistake():
    raise ConfigError("no such preset")

sys.exit(exit_status(mistake))
"""


def test_a_log_on_a_full_disk_leaves_the_exit_status() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", MISTAKEN], stderr=full, env=dict(os.environ), check=False)
    assert done.returncode == 2


CLOSED = """
import errno, os, sys
from tinyllm_ray.command import exit_status

def refuse():
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "others/run")

sys.exit(exit_status(refuse))
"""


def test_a_path_of_somebody_elses_is_one_line_and_status_2() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, check=False)
    why = "permission denied; choose another, or have it opened to you"
    assert (done.returncode, done.stderr) == (2, f"error: others/run: {why}\n")
