"""Deadlines over an injectable clock, and durations as people and Slurm write them.

Standard library only: the supervisor imports this module.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinyllm_ray.errors import ConfigError

Clock = Callable[[], float]
"""Seconds on a clock that never goes back; only differences mean anything."""

_UNIT_SECONDS = {"h": 3600, "m": 60, "s": 1}
_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_DURATION = re.compile(rf"(?:(?P<h>{_NUMBER})h)?(?:(?P<m>{_NUMBER})m)?(?:(?P<s>{_NUMBER})s)?")


@dataclass(frozen=True)
class Deadline:
    """A moment on `clock` by which everything has to be over."""

    at: float
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> "Deadline":
        return cls(clock() + seconds, clock)

    def remaining(self) -> float:
        """Seconds left; negative once the deadline has passed."""
        return self.at - self.clock()

    def earlier_by(self, seconds: float) -> "Deadline":
        """The same deadline with a margin of `seconds` kept free before it."""
        return Deadline(self.at - seconds, self.clock)


def parse_duration(text: str, name: str = "duration") -> float:
    """Seconds of a duration with units: `90s`, `45m`, `1h30m`, `1.5h`.

    Every number carries its unit (h, m, s, in this order), so that `45` can never be read as seconds by one
    program and as minutes by the next. Raises ConfigError for anything else, and for zero.

    >>> from tinyllm_ray.clock import format_duration, parse_duration
    >>> parse_duration("1h30m"), format_duration(90)
    (5400.0, '1m30s')
    """
    match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or not any(match.groups()):
        raise ConfigError(
            f"{name}: {text!r} is not a duration; write numbers with their units h, m, s, like 90s, 45m or 1h30m"
        )
    seconds = sum(float(value) * _UNIT_SECONDS[unit] for unit, value in match.groupdict().items() if value)
    if seconds <= 0:
        raise ConfigError(f"{name}: {text!r} is zero; it must be longer than that, like 90s, 45m or 1h30m")
    return seconds


def format_duration(seconds: float) -> str:
    """A duration for people, to the second: `1h02m05s`, `2m05s`, `5s`; `parse_duration` reads it back."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m{rest:02d}s"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


_SLURM_TIME = re.compile(
    r"(?P<days>\d{1,9})-(?P<dh>\d{1,9})(?::(?P<dm>\d{1,9})(?::(?P<ds>\d{1,9}))?)?"
    r"|(?P<h>\d{1,9}):(?P<hm>\d{1,9}):(?P<hs>\d{1,9})"
    r"|(?P<m>\d{1,9})(?::(?P<s>\d{1,9}))?",
    re.ASCII,
)


def parse_slurm_time(text: str) -> float | None:
    """Seconds of a Slurm time, None for `UNLIMITED`.

    The forms are those of sbatch's `--time` and squeue's `%L`: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours, days-hours:minutes and days-hours:minutes:seconds. `4:00` is four minutes, `2-12` is sixty hours.
    Raises ConfigError for anything else.
    """
    stripped = text.strip()
    if stripped.upper() in {"UNLIMITED", "INFINITE"}:
        return None
    match = _SLURM_TIME.fullmatch(stripped)
    if match is None:
        raise ConfigError(
            f"Slurm time: {text!r} is not one of minutes, minutes:seconds, hours:minutes:seconds, "
            "days-hours[:minutes[:seconds]]"
        )
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    minutes = part["days"] * 1440 + (part["dh"] + part["h"]) * 60 + part["dm"] + part["hm"] + part["m"]
    return float(minutes * 60 + part["ds"] + part["hs"] + part["s"])
