"""A study goes on after any end: its processes are killed at random moments, and nothing is lost or there twice."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kill_sessions.py")
LANES = 2
"""Studies that are killed beside one another."""


def kill(kills: int, folder: Path) -> None:
    lanes = []
    for lane in range(LANES):
        temporary = folder / str(lane)
        temporary.mkdir()
        seed = random.randrange(2**32)  # said by the program, so that what it found can be looked for again
        command = [sys.executable, str(PROGRAM), "--kills", str(kills // LANES), "--seed", str(seed)]
        environment = {**os.environ, "TMPDIR": str(temporary)}
        lanes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    for process in lanes:
        said, _ = process.communicate()
        print(said)
        assert process.returncode == 0, said


@pytest.mark.long
def test_forty_kills_lose_nothing_and_every_second_is_charged_once(tmp_path: Path) -> None:
    kill(40, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_kills_lose_nothing_and_every_second_is_charged_once(tmp_path: Path) -> None:
    kill(1000, tmp_path)
