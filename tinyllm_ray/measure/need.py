"""Whether what was timed so far is enough: when a warm-up is over, and what the next window would still tell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tinyllm_ray.figures import told_apart
from tinyllm_ray.measure.bounds import PROCESS_SPREAD, UNKNOWN_NOISE, WindowNoise, throughput_bounds, window_error
from tinyllm_ray.protocol import Protocol

STEADY_UPDATES = 3
"""After the first update at least so many follow before a window: the second may compile a graph for gradients that
exist already, CUDA graphs of `reduce-overhead` warm up in the first and are recorded in the second, a graph of the
whole update is captured in the fourth of all. One that differs from those after it keeps the warm-up going."""
STEADY_SHARE = 0.05
"""Updates within this of each other are steady; a compilation or a recording takes ten times an update or more."""
ROUGH_SHARE = 0.25
ROUGH_SECONDS = 1.5
"""Single updates of a host-bound candidate never come within 5%; after so long within a quarter is steady enough:
what is left is noise, which windows average."""

SINGLE_WINDOW_MARGIN = 0.10
"""One window alone is believed against a candidate only where it is this much below: single windows of 0.5 to 2.5 s
were seen up to 3.4% off their neighbours."""

CONFIDENCE = 0.98
"""Of a candidate's upper bound and of the lower one that it has to reach, two-sided. After every window is asked again,
and the best so far was the luckiest of several: by simulation 3% at most of those that equal it are stopped, where
95% stopped up to 5%."""


@dataclass(frozen=True)
class Bar:
    """What a candidate has to be able to reach."""

    targets_per_second: float | None = None
    """The lower bound of the best so far; None where there is nothing to beat, and then nothing is dominated."""
    process_spread: float = PROCESS_SPREAD
    """Standard deviation of log throughput between processes of one execution on this device."""
    window_noise: WindowNoise = UNKNOWN_NOISE
    """Of this device's windows, as short as the protocol's."""


def is_warm(update_seconds: Sequence[float], protocol: Protocol) -> bool:
    """Whether a window may begin after updates that took so long, each waited for, the first (compiling) included."""
    after_first = update_seconds[1:]
    if len(update_seconds) >= protocol.warmup_updates:
        return True
    if len(after_first) < STEADY_UPDATES:
        return False
    last = after_first[-STEADY_UPDATES:]
    usual = sum(after_first) - max(after_first)  # the slowest may be a compilation
    share = STEADY_SHARE if usual < ROUGH_SECONDS else ROUGH_SHARE
    return max(last) <= (1 + share) * min(last)


def updates_to_fill(seconds: float, seconds_per_update: float) -> int:
    """Updates that take `seconds` or a little longer; 1 at least."""
    return max(1, math.ceil(seconds / seconds_per_update)) if seconds_per_update > 0 else 1


def why_dominated(rates: Sequence[float], bar: Bar) -> str | None:
    """In words, why a candidate with these windows (targets a second) cannot win; None where it still may."""
    beat = bar.targets_per_second
    if beat is None:
        return None
    high = throughput_bounds(rates, bar.process_spread, CONFIDENCE, bar.window_noise).high
    if len(rates) == 1:
        high = max(high, rates[0] / (1 - SINGLE_WINDOW_MARGIN))
    if high >= beat:
        return None
    most, least = told_apart(",.0f", high, beat)
    return f"at most {most} targets/s after {len(rates)} window{'s' * (len(rates) > 1)}, {least} are to beat"


def is_enough(rates: Sequence[float], updates: int, seconds: float, bar: Bar, protocol: Protocol) -> bool:
    """Whether more windows would add nothing, after windows of so many `updates` and `seconds` in all.

    With something to beat they go on until their own error is half the spread between processes: together the two are
    then 12% above the latter alone, which no further window of this process lowers. But neither beyond a cap, nor once
    they have as many updates as windows by count.
    """
    if len(rates) < protocol.windows or seconds < protocol.least_seconds or updates < protocol.least_updates:
        return False
    if bar.targets_per_second is None or len(rates) >= protocol.most_windows:
        return True
    if updates >= protocol.counted_updates:
        return True
    return window_error(rates, bar.window_noise) <= bar.process_spread / 2
