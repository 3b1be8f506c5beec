"""The time that is left of the Slurm allocation this process runs in.

Standard library only: the supervisor's command line imports this module.
"""

import time
from collections.abc import Callable, Mapping

from tinyllm_ray.clock import Deadline, format_duration
from tinyllm_ray.errors import ConfigError

END_VARIABLE = "SLURM_JOB_END_TIME"
"""When Slurm ends the job, in seconds since 1970; set by Slurm itself from 23.02 on, before that by the launcher."""

MARGIN_SECONDS = 60.0
"""Kept free before the allocation's end: records are copied and Ray's processes ended; half of it is Slurm's own
time from TERM to KILL (`KillWait`, 30 s by default)."""
MARGIN_SHARE = 0.1
"""The margin where the allocation is short."""
WARNING_SECONDS = 125.0
"""Before the allocation's end, from when on Slurm's warning may come: asked for 60 s before it (`--signal`), it may be
up to 60 s early (sbatch(1))."""


def allocation_seconds_left(environment: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Seconds until Slurm ends this job; None outside of one, and for one without a limit."""
    text = environment.get(END_VARIABLE, "")
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        return None
    return int(text) - now()


def margin_seconds(left: float) -> float:
    """What is kept free before the end of an allocation that has `left` seconds."""
    return min(MARGIN_SECONDS, MARGIN_SHARE * left)


def seconds_within_allocation(
    budget_seconds: float, environment: Mapping[str, str], now: Callable[[], float] = time.time
) -> float:
    """The smaller of a budget and the allocation's time left less a margin, which is at most a tenth of that time.

    Raises ConfigError where the allocation is over.
    """
    left = allocation_seconds_left(environment, now)
    if left is None:
        return budget_seconds
    if left <= 0:
        raise ConfigError(
            f"the Slurm allocation ended {format_duration(-left)} ago ({END_VARIABLE}={environment[END_VARIABLE]}); "
            f"submit again, or unset {END_VARIABLE} outside of a job"
        )
    return min(budget_seconds, left - margin_seconds(left))


def within_allocation(deadline: Deadline, environment: Mapping[str, str]) -> Deadline:
    """The deadline, or the moment by which what is left of the allocation less its margin is over, if that is earlier.

    Raises ConfigError as `seconds_within_allocation`.
    """
    seconds = seconds_within_allocation(deadline.remaining(), environment)
    return Deadline(min(deadline.at, deadline.clock() + seconds), deadline.clock)
