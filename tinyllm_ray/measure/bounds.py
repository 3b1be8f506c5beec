"""How far the throughput of one process may lie from its execution's own: noise of windows and of processes.

The unit of replication is a process: two processes of one execution differ by more than their windows say, and no
number of windows averages that away. On log throughput, with n windows of standard deviation s about each other,

    variance = process spread^2 + cost x w^2 / n,    w^2 = (v0 w0^2 + (n - 1) s^2) / (v0 + n - 1)

where w0 is what windows do elsewhere, worth v0 degrees of freedom (a few windows alone say little about their own
noise: the moderated variance of Smyth 2004, doi:10.2202/1544-6115.1027), and cost is that of the median against
the mean. The bounds are t quantiles with v0 + n - 1 degrees of freedom.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tinyllm_ray.measure.student import t_quantile

PROCESS_SPREAD = 0.0025
"""Standard deviation of log throughput between processes of one execution on one device: 0.23% pooled over 25
processes in 10 groups of equal kernels on GH200 and H200; single groups 0.03% to 0.49%."""

WINDOW_SPREAD = 0.005
"""Standard deviation between windows of one process: 0.02% to 0.6% compiled, up to 2.3% eager, on the same machines."""
WINDOW_SPREAD_DEGREES = 3


@dataclass(frozen=True)
class WindowNoise:
    """What windows of one process on a device do, before any of this one."""

    spread: float = WINDOW_SPREAD
    """Standard deviation of their log throughput."""
    degrees: float = WINDOW_SPREAD_DEGREES
    """Degrees of freedom that this is worth."""


UNKNOWN_NOISE: Final = WindowNoise()
"""Where no other window of the device is known."""

_MEDIAN_COST = math.pi / 2
"""Variance of a median over that of a mean, in the limit of many values."""


@dataclass(frozen=True)
class Bounds:
    """Targets a second: where an execution's own throughput may lie."""

    low: float
    rate: float
    """The median of the windows."""
    high: float


def throughput_bounds(
    rates: Sequence[float],
    process_spread: float = PROCESS_SPREAD,
    confidence: float = 0.95,
    noise: WindowNoise = UNKNOWN_NOISE,
) -> Bounds:
    """Bounds from one process's windows (targets a second each), two-sided. Raises ValueError without windows."""
    if not rates:
        raise ValueError("no window, no bounds")
    degrees = noise.degrees + len(rates) - 1
    error = math.hypot(process_spread, window_error(rates, noise))
    margin = t_quantile((1 + confidence) / 2, degrees) * error
    rate = statistics.median(rates)
    return Bounds(rate * math.exp(-margin), rate, rate * math.exp(margin))


def window_error(rates: Sequence[float], noise: WindowNoise = UNKNOWN_NOISE) -> float:
    """Standard error of the log of the windows' median, as a measure of this process alone."""
    logs = [math.log(rate) for rate in rates]
    mean = statistics.fmean(logs)
    squares = sum((log - mean) ** 2 for log in logs)
    degrees = noise.degrees + len(rates) - 1
    variance = (noise.degrees * noise.spread**2 + squares) / degrees
    # Of one or two windows the median is the mean.
    cost = _MEDIAN_COST if len(rates) > 2 else 1.0
    return math.sqrt(cost * variance / len(rates))
