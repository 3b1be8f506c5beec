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
