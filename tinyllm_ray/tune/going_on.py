"""What a command line says when a study was ended, or died, before its end: the exact command that goes on with it.

Standard library only: the supervisor's command line imports this module.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from tinyllm_ray.clock import format_duration
from tinyllm_ray.errors import EXIT_BUG

_FIRST_SIGNAL = 128
"""Exit statuses from it on are signals'."""


def going_on(arguments: Sequence[str], out: Path, exit_status: int, seconds_left: float) -> str | None:
    """The line to say; None for a study that came to its end, or has nothing left to go on with.

    `arguments` are those that the study in `out` was begun or gone on with.
    """
    ended_early = exit_status == EXIT_BUG or exit_status >= _FIRST_SIGNAL
    if not ended_early or seconds_left <= 0:
        return None
    words = [*arguments]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words += ["--out", str(out)]
    if "--resume" not in words:
        words.append("--resume")
    command = shlex.join(["python", "-m", "tinyllm_ray.tune", *words])
    return f"go on, with {format_duration(seconds_left)} left of the budget: {command}"
