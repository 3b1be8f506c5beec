"""The timing protocol under a clock that moves only when the subject or a callback says so."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from tinyllm_ray.measure.windows import Measurement, measure
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Window

TARGETS = 1000


class Subject:
    """Updates take no host time; the device is busy with each for the seconds it is told, until a wait."""

    targets_per_update = TARGETS

    def __init__(self, seconds: Callable[[int], float], losses: Callable[[int], float] = float) -> None:
        self.now = 100.0
        self.updates = 0
        self.data_wait_seconds = 5.0
        self.calls: list[str] = []
        self._seconds = seconds
        self._losses = losses
        self._queued = 0.0

    def step(self) -> None:
        self._queued += self._seconds(self.updates)
        self.data_wait_seconds += 0.25
        self.updates += 1
        self.calls.append("step")

    def synchronize(self) -> None:
        self.now += self._queued
        self._queued = 0.0
        self.calls.append("synchronize")

    def read(self) -> tuple[float, float]:
        """Slow on purpose: none of it may count."""
        assert not self._queued, "reading waits for the device"
        self.now += 1000.0
        self.calls.append("read")
        return self._losses(self.updates), 10.0 * self.updates

    def measure(self, protocol: Protocol, **callbacks: Any) -> Measurement:
        return measure(self, protocol, clock=lambda: self.now, wall_clock=lambda: 7.0 + self.updates, **callbacks)


def per_window(update: int) -> float:
    """7 s for the first update, 2 s for the other two of the warm-up, then windows of 4 at 1, 3 and 2 s an update."""
    return 7.0 if update == 0 else 2.0 if update < 3 else (1.0, 3.0, 2.0)[(update - 3) // 4]


PROTOCOL = Protocol(warmup_updates=3, windows=3, updates_per_window=4)


def test_every_stage_is_timed_exactly() -> None:
    found = Subject(per_window).measure(PROTOCOL)
    assert found.first_update_seconds == 7.0
    assert found.warmup_seconds == 11.0
    assert [window.seconds for window in found.windows] == [4.0, 12.0, 8.0]
    assert [window.targets_per_second for window in found.windows] == [TARGETS / 1, TARGETS / 3, TARGETS / 2]
    assert found.targets_per_second == TARGETS / 2
    assert found.seconds_per_update == 2.0


def test_windows_carry_what_was_run() -> None:
    found = Subject(per_window).measure(PROTOCOL)
    assert [window.index for window in found.windows] == [0, 1, 2]
    assert {(window.updates, window.targets) for window in found.windows} == {(4, 4 * TARGETS)}
    assert {window.data_wait_seconds for window in found.windows} == {1.0}
    assert [window.loss for window in found.windows] == [7.0, 11.0, 15.0]
    assert [window.grad_norm for window in found.windows] == [70.0, 110.0, 150.0]
    assert [window.timestamp for window in found.windows] == [14.0, 18.0, 22.0]


def test_nothing_is_read_or_waited_for_inside_a_window() -> None:
    subject = Subject(per_window)
    subject.measure(PROTOCOL)
    window = ["step"] * 4 + ["synchronize", "read"]
    assert subject.calls == ["step", "synchronize", "step", "step", "synchronize", *window * 3]


def test_callbacks_hear_of_each_stage_outside_the_timed_parts() -> None:
    subject = Subject(per_window)
    heard: list[tuple[int, object]] = []

    def hear(what: object) -> None:
        heard.append((subject.updates, what))
        subject.now += 500.0

    found = subject.measure(PROTOCOL, on_first_update=hear, on_warm=hear, on_window=hear)
    assert heard == [(1, 7.0), (3, 11.0), *((7 + 4 * window.index, window) for window in found.windows)]
    assert found.warmup_seconds == 11.0
    assert [window.seconds for window in found.windows] == [4.0, 12.0, 8.0]


def test_a_callback_that_raises_ends_the_measurement() -> None:
    subject = Subject(per_window)

    def stop(window: Window) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        subject.measure(PROTOCOL, on_window=stop)
    assert subject.updates == 7


def test_one_warm_up_update_and_an_even_number_of_windows() -> None:
    found = Subject(lambda update: float(update or 1)).measure(
        Protocol(warmup_updates=1, windows=2, updates_per_window=1)
    )
    assert found.warmup_seconds == found.first_update_seconds == 1.0
    assert found.targets_per_second == (TARGETS / 1 + TARGETS / 2) / 2
    assert found.seconds_per_update == 1.5


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_none(loss: float) -> None:
    found = Subject(per_window, lambda update: loss if update > 7 else 1.0).measure(PROTOCOL)
    assert [window.loss for window in found.windows] == [1.0, None, None]
    assert all(window.grad_norm is not None for window in found.windows)
