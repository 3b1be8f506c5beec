"""The command that runs on a job's cluster: what it is told, which signals reach it and when, and its end.

Standard library only: the launcher imports this module.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyllm_ray.allocation import END_VARIABLE, WARNING_SECONDS, allocation_seconds_left, margin_seconds
from tinyllm_ray.cluster.descendants import die_with_parent, end_descendants
from tinyllm_ray.cluster.hand_back import HAND_BACK_VARIABLE, HandBack
from tinyllm_ray.cluster.node import ray_environment
from tinyllm_ray.cluster.steps import Steps, describe
from tinyllm_ray.command import note
from tinyllm_ray.errors import EXIT_BUG

GRACE_SECONDS = {signal.SIGUSR1: 45.0, signal.SIGTERM: 20.0, signal.SIGINT: 20.0, signal.SIGHUP: 20.0}
"""For the command's own end once told to: a warning is passed on 48 s before the limit, KILL comes 30 s after TERM
(`KillWait`)."""
_PASSED_ON_SHARE = 0.8
"""Of the margin that a study keeps free: it has ended by itself when the warning is passed on."""
_TICK_SECONDS = 0.2


def driver_environment(environment: Mapping[str, str], head: Mapping[str, Any], left: float | None) -> dict[str, str]:
    """Variables for the command: where the cluster is, its secret's file, and when the allocation ends."""
    variables = ray_environment(environment, Path(head["token"])) | {"RAY_ADDRESS": head["address"]}
    if left is not None:
        variables.setdefault(END_VARIABLE, str(int(time.time() + left)))
    return variables


class Warned:
    """Slurm's warning before the limit comes up to a minute early; passed on then, it would cut a study short."""

    def __init__(self, environment: Mapping[str, str], now: Callable[[], float] = time.time) -> None:
        left = allocation_seconds_left(environment, now)
        self._now = now
        self._ends = None if left is None else now() + left
        self._pass_on = None if left is None else now() + left - _PASSED_ON_SHARE * margin_seconds(left)

    def is_early(self, signals: Sequence[int]) -> bool:
        """Whether these are warnings of the limit and can wait; what comes well before it is somebody's own wish."""
        if self._ends is None or self._pass_on is None or any(number != signal.SIGUSR1 for number in signals):
            return False
        return self._ends - WARNING_SECONDS <= self._now() < self._pass_on


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    steps: Steps,
    head: str,
    received: Sequence[int],
    spare: HandBack,
) -> int:
    """Run the command to its end, telling it of signals; its exit status, or 1 where the head went away under it."""
    variables = {**environment, HAND_BACK_VARIABLE: str(spare.path.absolute())}
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
    )
    warned = Warned(environment)
    kill_at, heard, lost = None, 0, set(steps.ended)
    while process.poll() is None:
        steps.hear(_TICK_SECONDS)
        lost |= {*spare.look(steps)}
        for node in set(steps.ended) - lost:
            lost.add(node)
            note(f"cluster: lost {describe(steps, [node])}", sys.stderr)
        news = [signal.Signals(number) for number in received[heard:]]
        grace = min(GRACE_SECONDS[number] for number in news) if news and not warned.is_early(news) else None
        if grace is None and head in lost and kill_at is None:
            grace = GRACE_SECONDS[signal.SIGTERM]
        if grace is not None:
            if kill_at is None:
                process.terminate()  # a second one would have it drop what it saves
            heard = len(received)
            kill_at = min(kill_at or float("inf"), time.monotonic() + grace)
        if kill_at is not None and time.monotonic() >= kill_at:
            process.kill()
            process.wait()
    left = end_descendants(patience_seconds=1.0, limit_seconds=5.0, keep=steps.processes)
    if left:
        note(f"cluster: not ended by the kernel yet: {', '.join(left)}", sys.stderr)
    if process.returncode < 0 and not received:
        note(f"cluster: the command was ended by {signal.Signals(-process.returncode).name}", sys.stderr)
    if head in lost and not received:
        return EXIT_BUG  # whatever the command made of being told to end
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
