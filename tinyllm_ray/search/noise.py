"""How much two processes of one execution differ on a device, learned from repeats, and what follows for a figure.

The unit of replication is a process: what one process's windows say of themselves is in `measure.bounds`.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from tinyllm_ray.measure.bounds import (
    PROCESS_SPREAD,
    UNKNOWN_NOISE,
    WINDOW_SPREAD,
    WINDOW_SPREAD_DEGREES,
    Bounds,
    WindowNoise,
    throughput_bounds,
)
from tinyllm_ray.measure.need import CONFIDENCE, Bar
from tinyllm_ray.records import Fate, TrialRecord

UNSEEN_SECONDS: Final = 0.5
"""Length of the windows that `measure.bounds` is right of while nothing is known of a device's own."""

MOST_DEGREES: Final = 12
"""Of freedom that a study's windows are worth for those of one more process."""


@dataclass(frozen=True)
class Spread:
    """Standard deviation of log throughput between processes of one execution on one device: the A/A floor."""

    value: float = PROCESS_SPREAD
    degrees: float = 4
    """How many degrees of freedom the value is worth. Four: groups of equal processes on one machine spread by 0.03%
    to 0.49%, so that what other machines do says only so much about this one."""


def learned_spread(groups: Iterable[Sequence[float]], prior: Spread | None = None) -> Spread:
    """`prior` with what repeats say: each group the targets/second of processes of one execution on one device, in
    the order of time.

    The variance of a group is half the mean square of its successive differences (von Neumann et al. 1941,
    doi:10.1214/aoms/1177731746), so that a slow drift does not count as noise; it is pooled with the prior's as in
    Smyth 2004.
    """
    prior = prior or Spread()
    squares, degrees = prior.degrees * prior.value**2, prior.degrees
    for group in groups:
        logs = [math.log(rate) for rate in group]
        for one, other in itertools.pairwise(logs):
            squares += (other - one) ** 2 / 2
            degrees += 1
    return Spread(math.sqrt(squares / degrees), degrees)


def spread_of(records: Iterable[TrialRecord], prior: Spread | None = None) -> Spread:
    """The spread that the repeats among complete records show (oldest first), by execution, protocol and device."""
    groups: dict[tuple[object, ...], list[float]] = {}
    for record in records:
        rate = record.targets_per_second
        if record.fate == Fate.COMPLETE and rate and rate > 0:
            length = record.protocol.least_seconds if record.protocol else 0.0
            groups.setdefault((record.execution_identity, device_name(record), length), []).append(rate)
    return learned_spread(groups.values(), prior)


def record_bounds(
    record: TrialRecord, spread: Spread | None = None, confidence: float = 0.95, noise: WindowNoise = UNKNOWN_NOISE
) -> Bounds | None:
    """Where the throughput of the record's execution may lie on its device; None without windows to judge by."""
    rates = [window.targets_per_second for window in record.windows]
    if not rates or min(rates) <= 0:
        return None
    return throughput_bounds(rates, (spread or Spread()).value, confidence, noise)


class NoiseOfWindows:
    """What the windows of a study's records do: the shorter, the noisier, by the root of their lengths."""

    def __init__(self, records: Iterable[TrialRecord]) -> None:
        """`records` are of processes alike in nothing but their device."""
        self._squares, self._degrees = WINDOW_SPREAD_DEGREES * WINDOW_SPREAD**2 * UNSEEN_SECONDS, 0.0
        for record in records:
            rates = [window.targets_per_second for window in record.windows]
            if len(rates) > 1 and min(rates) > 0:
                logs = [math.log(rate) for rate in rates]
                mean = fmean(logs)
                pairs = zip(logs, record.windows, strict=True)
                self._squares += sum((log - mean) ** 2 * window.seconds for log, window in pairs)
                self._degrees += len(logs) - 1

    def of(self, seconds: float) -> WindowNoise:
        """Of windows of so many seconds; a record may differ from the others, so that many say no more than some."""
        degrees = WINDOW_SPREAD_DEGREES + self._degrees
        spread = math.sqrt(self._squares / degrees / seconds)
        return WindowNoise(spread, min(degrees, MOST_DEGREES))

    def of_record(self, record: TrialRecord) -> WindowNoise:
        """Of windows as long as the record's."""
        seconds = [window.seconds for window in record.windows]
        return self.of(fmean(seconds)) if seconds and min(seconds) > 0 else UNKNOWN_NOISE


def bar_of(
    incumbent: TrialRecord | None,
    spread: Spread | None = None,
    device_ratio: float = 1.0,
    noise: NoiseOfWindows | None = None,
    window_seconds: float = UNSEEN_SECONDS,
) -> Bar:
    """What a candidate timed in windows of `window_seconds` has to be able to reach: the incumbent's lower bound.

    `device_ratio` is the speed of the candidate's device relative to the incumbent's (`DeviceBlocks.ratio`).
    """
    spread, noise = spread or Spread(), noise or NoiseOfWindows(())
    bounds = record_bounds(incumbent, spread, CONFIDENCE, noise.of_record(incumbent)) if incumbent else None
    return Bar(bounds.low * device_ratio if bounds else None, spread.value, noise.of(window_seconds))


def device_name(record: TrialRecord) -> str:
    """What tells the record's device from others: its UUID, or the host where it has none; empty where unknown."""
    if not record.devices:
        return ""
    device = record.devices[0]
    return device.identifier or f"{device.kind} of {device.host}"
