"""Starts a study's child, with the line to it, and sees whether it has ended.

Standard library only: the supervisor imports this module.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tinyllm_ray.tune.channel import CHANNEL_VARIABLE, HELD_SIGNALS, Lines
from tinyllm_ray.tune.processes import STUDY_VARIABLE


def start_child(
    command: Sequence[str], request: Mapping[str, Any], budget_seconds: float, marker: str
) -> tuple["subprocess.Popen[bytes]", Lines]:
    """Run `command`, which finds its request by `channel.attach` and inherits `marker` as every process of the study.

    `budget_seconds` is what the child has from its start until it is told to end.
    """
    reading, writing = os.pipe()
    answers, answering = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)  # which the child inherits
    try:
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps({**request, "budget_seconds": budget_seconds}).encode())
            file.seek(0)
            descriptors = (file.fileno(), writing, answers)
            variables = {STUDY_VARIABLE: marker, CHANNEL_VARIABLE: ",".join(map(str, descriptors))}
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **variables},
                pass_fds=descriptors,
                start_new_session=True,  # the terminal's Ctrl-C reaches the supervisor only
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(writing)
        os.close(answers)
    return child, Lines(reading, answering)


def has_ended(child: "subprocess.Popen[bytes]") -> bool:
    """Without reaping it: its number must stay its own until the study's processes have been found."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
