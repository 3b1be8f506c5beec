"""Devices as blocks: one control, measured on each of them first and from time to time, makes them comparable.

Identical GPUs differ by a few percent (1.473, 1.496 and 1.539 M targets/s for one program on three GH200), which is
more than most candidates do. A device's level is that of its controls; where they show a trend, its line at that time,
which ends with the controls: of a study that goes on a day later a line would make anything.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinyllm_ray.measure.bounds import Bounds
from tinyllm_ray.measure.student import t_quantile
from tinyllm_ray.search.noise import Spread

CONTROL_EVERY_SECONDS = 600.0
SLOW_SHARE = 0.02
"""A device so far below the fastest is flagged."""

_TREND_CONTROLS = 4
"""Fewer controls cannot show a trend beside their noise."""


@dataclass(frozen=True)
class Control:
    """One measurement of the control on one device."""

    device: str
    at_seconds: float
    """On any one clock of the study."""
    targets_per_second: float


@dataclass(frozen=True)
class DeviceSpeed:
    """One device in the report's map."""

    device: str
    ratio: float
    """Its speed relative to the fastest device."""
    low: float
    """The ratio's 95% interval; it is 1 to 1 for the fastest itself."""
    high: float
    drift_per_hour: float
    """Relative change of its speed an hour; 0 where its controls show none."""
    controls: int
    slow: bool
    """More than 2% below the fastest, and not by noise alone."""

    def __str__(self) -> str:
        share = f"{self.ratio:.1%} of the fastest device's speed ({self.low:.1%} to {self.high:.1%}, 95%)"
        return f"{self.device} has {share}, by {self.controls} control{'s' if self.controls > 1 else ''}"


@dataclass(frozen=True)
class _Level:
    """Log throughput of a device's control: mean + drift x (t - centre), and the variances of both."""

    mean: float
    centre: float
    drift: float
    mean_variance: float
    drift_variance: float
    begin: float
    end: float
    """The drift holds between the two, a control's distance before the first and after the last."""

    def at(self, seconds: float) -> float:
        return self.mean + self.drift * (self.held(seconds) - self.centre)

    def variance_at(self, seconds: float) -> float:
        return self.mean_variance + self.drift_variance * (self.held(seconds) - self.centre) ** 2

    def held(self, seconds: float) -> float:
        """The nearest time that the drift is known for."""
        return min(max(seconds, self.begin), self.end)


class DeviceBlocks:
    """The study's devices as their controls show them."""

    def __init__(self, controls: Iterable[Control], spread: Spread | None = None) -> None:
        self.spread = spread or Spread()
        self._controls: dict[str, list[Control]] = {}
        for control in sorted(controls, key=lambda control: control.at_seconds):
            self._controls.setdefault(control.device, []).append(control)
        self._levels = {device: self._level(controls) for device, controls in self._controls.items()}

    def control_due(self, device: str, now_seconds: float) -> bool:
        """Whether the device is to measure the control before anything else: at first, and every ten minutes."""
        controls = self._controls.get(device)
        return controls is None or now_seconds - controls[-1].at_seconds >= CONTROL_EVERY_SECONDS

    def ratio(self, device: str, other: str, at_seconds: float, other_at_seconds: float) -> Bounds:
        """Speed of `device` at a time relative to `other` at another, with its 95% interval.

        Without a control of both it is 1, with the bounds that devices of one kind were seen to have. Of one device it
        carries the drift between the two times.
        """
        log, variance = self._log_ratio(device, other, at_seconds, other_at_seconds)
        margin = t_quantile(0.975, self.spread.degrees) * math.sqrt(variance)
        return Bounds(math.exp(log - margin), math.exp(log), math.exp(log + margin))

    def compare(self, rate: float, other_rate: float, effect: Bounds) -> Bounds:
        """Ratio of two executions' throughputs, each of one process, where `effect` is the ratio of their devices."""
        quantile = t_quantile(0.975, self.spread.degrees)
        devices = math.log(effect.high / effect.low) / 2 / quantile
        margin = quantile * math.hypot(math.sqrt(2) * self.spread.value, devices)
        ratio = rate / other_rate / effect.rate
        return Bounds(ratio * math.exp(-margin), ratio, ratio * math.exp(margin))

    def speeds(self) -> list[DeviceSpeed]:
        """All devices, the fastest first, as they were on average."""
        order = sorted(self._levels, key=lambda device: self._levels[device].mean, reverse=True)
        found = []
        for device in order:
            level, best = self._levels[device], self._levels[order[0]]
            ratio = self.ratio(device, order[0], level.centre, best.centre)
            if device == order[0]:
                ratio = Bounds(1.0, 1.0, 1.0)
            drift = math.expm1(level.drift * 3600)
            slow = ratio.rate < 1 - SLOW_SHARE and ratio.high < 1
            found.append(
                DeviceSpeed(device, ratio.rate, ratio.low, ratio.high, drift, len(self._controls[device]), slow)
            )
        return found

    def _log_ratio(self, device: str, other: str, at: float, other_at: float) -> tuple[float, float]:
        one, two = self._levels.get(device), self._levels.get(other)
        if device == other:
            if one is None:
                return 0.0, 0.0
            # The level itself cancels; what is left is the drift between the two times.
            return one.at(at) - one.at(other_at), one.drift_variance * (one.held(at) - one.held(other_at)) ** 2
        if one is None or two is None:
            return 0.0, _UNKNOWN_DEVICES**2
        return one.at(at) - two.at(other_at), one.variance_at(at) + two.variance_at(other_at)

    def _level(self, controls: Sequence[Control]) -> _Level:
        times = [control.at_seconds for control in controls]
        logs = [math.log(control.targets_per_second) for control in controls]
        mean, centre = statistics.fmean(logs), statistics.fmean(times)
        variance = self.spread.value**2
        ends = times[0] - CONTROL_EVERY_SECONDS, times[-1] + CONTROL_EVERY_SECONDS
        flat = _Level(mean, centre, 0.0, variance / len(logs), 0.0, *ends)
        lever = sum((time - centre) ** 2 for time in times)
        if len(logs) < _TREND_CONTROLS or not lever:
            return flat
        drift = sum((time - centre) * log for time, log in zip(times, logs, strict=True)) / lever
        noise = variance / lever
        if abs(drift) < t_quantile(0.975, self.spread.degrees) * math.sqrt(noise):
            return flat
        return _Level(mean, centre, drift, variance / len(logs), noise, *ends)


_UNKNOWN_DEVICES = 0.03
"""Standard deviation of log speed between two devices of one kind: the three GH200 above spread by 2.2%."""
