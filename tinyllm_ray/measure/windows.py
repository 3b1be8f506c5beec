"""The timing protocol: warm-up updates, then windows of updates between two waits for the device.

Throughput is the median over windows of targets a second. Nothing is read from the device inside a window, so the
protocol does not slow what it measures.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol as Contract

from tinyllm_ray.clock import Clock
from tinyllm_ray.records import Protocol, Window


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


@dataclass(frozen=True)
class Measurement:
    """What the protocol found."""

    first_update_seconds: float
    warmup_seconds: float
    """All warm-up updates, the first included."""
    windows: tuple[Window, ...]

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
) -> Measurement:
    """Time `subject` by `protocol`; the callbacks hear of each stage as it ends, outside the timed parts.

    `on_first_update` hears the first update's seconds, `on_warm` those of the whole warm-up.
    """
    begin = clock()
    subject.step()
    subject.synchronize()
    first_update_seconds = clock() - begin
    on_first_update(first_update_seconds)
    resumed = clock()
    for _ in range(protocol.warmup_updates - 1):
        subject.step()
    subject.synchronize()
    warmup_seconds = first_update_seconds + clock() - resumed
    on_warm(warmup_seconds)
    windows = []
    for index in range(protocol.windows):
        windows.append(_window(subject, index, protocol.updates_per_window, clock, wall_clock))
        on_window(windows[-1])
    return Measurement(first_update_seconds, warmup_seconds, tuple(windows))


def _window(subject: Measured, index: int, updates: int, clock: Clock, wall_clock: Clock) -> Window:
    waited = subject.data_wait_seconds
    begin = clock()
    for _ in range(updates):
        subject.step()
    subject.synchronize()
    seconds = clock() - begin
    loss, grad_norm = subject.read()
    targets = updates * subject.targets_per_update
    return Window(
        index=index,
        updates=updates,
        targets=targets,
        seconds=seconds,
        targets_per_second=targets / seconds,
        data_wait_seconds=subject.data_wait_seconds - waited,
        loss=loss if math.isfinite(loss) else None,
        grad_norm=grad_norm if math.isfinite(grad_norm) else None,
        timestamp=wall_clock(),
    )
