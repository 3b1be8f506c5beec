"""The timing protocol: warm-up updates, then windows of updates between two waits for the device.

Throughput is the median over windows of targets/second. Nothing is read from the device inside a window, so the
protocol does not slow what it measures. Warm-up and windows go by count, or, where the protocol is adaptive, by time
and need (`measure.need`): a candidate that cannot win any more is stopped within 3 s of its first update, or after
five more updates where those take longer.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol as Contract

from tinyllm_ray.clock import Clock
from tinyllm_ray.measure.need import STEADY_UPDATES, Bar, is_enough, is_warm, updates_to_fill, why_dominated
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import GpuState, Window


class Measured(Contract):
    """What can be timed: updates that are queued, and a wait until all of them are done."""

    def step(self) -> object:
        """Queue one update."""

    def synchronize(self) -> None:
        """Wait until every queued update is done."""

    def read(self) -> tuple[float, float]:
        """Loss and gradient norm of the last update."""

    @property
    def targets_per_update(self) -> int: ...

    @property
    def data_wait_seconds(self) -> float:
        """Host seconds spent waiting for data since the beginning."""


class Sensors(Contract):
    """What reads the device's clocks, power and heat, outside the timed parts."""

    def begin(self) -> None:
        """A window begins."""

    def read(self) -> GpuState | None:
        """What they say now, and what they counted since `begin`."""


class NoSensors:
    """For a device that has none."""

    def begin(self) -> None:
        pass

    def read(self) -> GpuState | None:
        return None


@dataclass(frozen=True)
class Measurement:
    """What the protocol found."""

    first_update_seconds: float
    warmup_seconds: float
    """All warm-up updates, the first included."""
    windows: tuple[Window, ...]
    dominated: str | None = None
    """Why the candidate cannot win and was stopped, for people; None where it was measured to the end."""

    @property
    def targets_per_second(self) -> float:
        return median(window.targets_per_second for window in self.windows)

    @property
    def seconds_per_update(self) -> float:
        return median(window.seconds / window.updates for window in self.windows)


def measure(
    subject: Measured,
    protocol: Protocol,
    on_window: Callable[[Window], None] = lambda window: None,
    on_first_update: Callable[[float], None] = lambda seconds: None,
    on_warm: Callable[[float], None] = lambda seconds: None,
    clock: Clock = time.perf_counter,
    wall_clock: Clock = time.time,
    bar: Bar | None = None,
    sensors: Sensors | None = None,
) -> Measurement:
    """Time `subject` by `protocol`; the callbacks hear of each stage as it ends, outside the timed parts.

    `on_first_update` hears the first update's seconds, `on_warm` those of the whole warm-up. `bar` is what an adaptive
    protocol stops a candidate for; without one it is measured to the end.
    """
    begin = clock()
    subject.step()
    subject.synchronize()
    first = clock() - begin
    on_first_update(first)
    warmup, typical = _warm_up(subject, first, protocol, clock)
    on_warm(warmup)
    bar, timer = bar or Bar(), _Timer(subject, clock, wall_clock, sensors or NoSensors())
    windows: list[Window] = []
    if protocol.version == 2:
        for _ in range(protocol.windows):
            windows.append(timer.window(len(windows), protocol.updates_per_window))
            on_window(windows[-1])
        return Measurement(first, warmup, tuple(windows))
    dominated: str | None = None
    while dominated is None and not (windows and _enough(windows, bar, protocol)):
        updates = updates_to_fill(protocol.window_seconds, typical)
        windows.append(timer.window(len(windows), updates, protocol.window_seconds))
        on_window(windows[-1])
        typical = windows[-1].seconds / windows[-1].updates
        dominated = why_dominated(_rates(windows), bar)
    return Measurement(first, warmup, tuple(windows), dominated)


def _warm_up(subject: Measured, first: float, protocol: Protocol, clock: Clock) -> tuple[float, float]:
    """The rest of the warm-up: seconds of all of it, `first` included, and those of one of its last updates."""
    if protocol.version == 2:
        begin = clock()
        for _ in range(protocol.warmup_updates - 1):
            subject.step()
        subject.synchronize()
        seconds = clock() - begin
        return first + seconds, seconds / max(1, protocol.warmup_updates - 1)
    updates = [first]
    while not is_warm(updates, protocol):
        # Each is waited for, to know its time; the windows queue theirs.
        begin = clock()
        subject.step()
        subject.synchronize()
        updates.append(clock() - begin)
    return sum(updates), median(updates[-STEADY_UPDATES:])


@dataclass(frozen=True)
class _Timer:
    subject: Measured
    clock: Clock
    wall_clock: Clock
    sensors: Sensors

    def window(self, index: int, updates: int, least_seconds: float = 0.0) -> Window:
        """Time `updates`, and as many more as it takes to fill `least_seconds`."""
        subject, clock, done = self.subject, self.clock, 0
        self.sensors.begin()
        waited = subject.data_wait_seconds
        begin = clock()
        while True:
            for _ in range(updates):
                subject.step()
            subject.synchronize()
            done += updates
            seconds = clock() - begin
            if seconds >= least_seconds:
                break
            # Updates queued behind each other are quicker than those of the warm-up, which were waited for.
            updates = updates_to_fill(least_seconds - seconds, seconds / done)
        gpu = self.sensors.read()
        loss, grad_norm = subject.read()
        targets = done * subject.targets_per_update
        return Window(
            index=index,
            updates=done,
            targets=targets,
            seconds=seconds,
            targets_per_second=targets / seconds,
            data_wait_seconds=subject.data_wait_seconds - waited,
            loss=loss if math.isfinite(loss) else None,
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            timestamp=self.wall_clock(),
            gpu=gpu,
        )


def _rates(windows: Sequence[Window]) -> list[float]:
    return [window.targets_per_second for window in windows]


def _enough(windows: Sequence[Window], bar: Bar, protocol: Protocol) -> bool:
    updates = sum(window.updates for window in windows)
    return is_enough(_rates(windows), updates, sum(window.seconds for window in windows), bar, protocol)
