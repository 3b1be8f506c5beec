"""Where a run's start goes, from the process's own start on.

Standard library only: it counts the imports that follow.
"""

import os
import time
from pathlib import Path

from tinyllm_ray.clock import Clock


class Stages:
    """Consecutive stages without gaps: a stage lasts from the end of the one before.

    The first begins `seconds_before` this object does, which is the age of the process where that is the program.
    """

    def __init__(self, seconds_before: float = 0.0, clock: Clock = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._began = self._last = clock() - seconds_before

    def end(self, name: str, **parts: float) -> None:
        """The stage `name` is over; with `parts` it is told as those, and `name` is what they leave of it."""
        now = self._clock()
        self.seconds |= parts
        self.seconds[name] = now - self._last - sum(parts.values())
        self._last = now

    @property
    def total(self) -> float:
        """Seconds of all ended stages."""
        return self._last - self._began


def process_age_seconds() -> float:
    """How long ago this process was started, the interpreter's own start included; 0 where the system does not tell."""
    try:
        # Field 22 in clock ticks since the machine's start; the command's name, field 2, may hold blanks.
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
