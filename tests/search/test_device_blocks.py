"""Devices made comparable by one control."""

import math
import random
from itertools import pairwise

import pytest

from tinyllm_ray.search.device_blocks import CONTROL_EVERY_SECONDS, Control, DeviceBlocks
from tinyllm_ray.search.noise import Spread

SPREAD = Spread(0.0025, 20)


def controls(device: str, *rates: float) -> list[Control]:
    return [Control(device, 600.0 * at, rate) for at, rate in enumerate(rates)]


def test_a_device_measures_the_control_first_and_every_ten_minutes() -> None:
    blocks = DeviceBlocks([Control("a", 100.0, 1e6), Control("a", 700.0, 1e6)])
    assert blocks.control_due("b", 0.0)
    assert not blocks.control_due("a", 700.0 + CONTROL_EVERY_SECONDS - 1)
    assert blocks.control_due("a", 700.0 + CONTROL_EVERY_SECONDS)


def test_the_map_of_three_gh200_flags_the_two_that_are_slow() -> None:
    """1.473, 1.496 and 1.539 M targets/s for one program."""
    blocks = DeviceBlocks(
        [Control("c", 0.0, 1.539e6), Control("a", 5.0, 1.473e6), Control("b", 9.0, 1.496e6), Control("d", 3.0, 1.53e6)],
        SPREAD,
    )
    speeds = blocks.speeds()
    assert [(speed.device, speed.slow) for speed in speeds] == [("c", False), ("d", False), ("b", True), ("a", True)]
    assert (speeds[0].ratio, speeds[0].low, speeds[0].high) == (1.0, 1.0, 1.0)
    assert speeds[3].ratio == pytest.approx(1.473 / 1.539)
    assert all(speed.low < speed.ratio < speed.high for speed in speeds[1:])
    assert all(one.ratio >= other.ratio for one, other in pairwise(speeds))


def test_a_noisy_device_is_not_called_slow_by_one_bad_control() -> None:
    pair = [Control("a", 0.0, 1e6), Control("b", 0.0, 0.975e6)]
    assert [speed.slow for speed in DeviceBlocks(pair, Spread(0.03, 20)).speeds()] == [False, False]
    assert [speed.slow for speed in DeviceBlocks(pair, SPREAD).speeds()] == [False, True]


def test_a_trend_of_the_controls_is_a_drift_and_their_noise_is_none() -> None:
    falling = DeviceBlocks(controls("a", *(1e6 * (1 - 0.003 * at) for at in range(6))), SPREAD)
    steady = DeviceBlocks(controls("a", 1e6, 1.002e6, 0.999e6, 1.001e6, 1e6, 0.998e6), SPREAD)
    assert falling.speeds()[0].drift_per_hour == pytest.approx(-0.018, abs=0.001)
    assert steady.speeds()[0].drift_per_hour == 0.0
    assert falling.ratio("a", "a", 3000.0, 0.0).rate == pytest.approx(1 - 0.015, abs=0.001)
    assert steady.ratio("a", "a", 3000.0, 0.0).rate == 1.0
    assert DeviceBlocks(controls("a", 1e6, 0.9e6), SPREAD).speeds()[0].drift_per_hour == 0.0, "two show no trend"


def test_a_drift_is_not_carried_on_beyond_its_controls() -> None:
    """By a line of 1.8% an hour a study that goes on a day later would find the device 35% slower."""
    falling = DeviceBlocks(controls("a", *(1e6 * (1 - 0.003 * at) for at in range(6))), SPREAD)
    steady = DeviceBlocks(controls("a", 1e6, 1e6), SPREAD)
    day = 86400.0
    soon, late = (falling.ratio("a", "a", 3000.0 + seconds, 0.0) for seconds in (CONTROL_EVERY_SECONDS, day))
    assert late == soon
    assert late.rate == pytest.approx(1 - 6 * 0.003, abs=0.001)
    assert falling.ratio("a", "a", 3000.0, -day).rate == pytest.approx(1 - 6 * 0.003, abs=0.001)
    assert steady.ratio("a", "a", day, 0.0).rate == 1.0


def test_more_controls_make_the_ratio_sharper() -> None:
    def width(count: int) -> float:
        blocks = DeviceBlocks(controls("a", *[1e6] * count) + controls("b", *[1e6] * count), SPREAD)
        bounds = blocks.ratio("a", "b", 0.0, 0.0)
        return bounds.high - bounds.low

    assert width(3) < 0.7 * width(1)


def test_without_controls_devices_count_as_equal_with_wide_bounds() -> None:
    bounds = DeviceBlocks([Control("a", 0.0, 1e6)], SPREAD).ratio("a", "b", 0.0, 0.0)
    assert bounds.rate == 1.0
    assert bounds.high > 1.05


def test_a_comparison_across_devices_carries_them() -> None:
    """Equal executions on devices 4% apart: within the interval in nearly all of 300 worlds, never without controls."""
    generator = random.Random(5)

    def figure(level: float) -> float:
        return 1e6 * math.exp(level + generator.gauss(0, 0.0025))

    covered = 0
    for _ in range(300):
        blocks = DeviceBlocks([Control("a", 0.0, figure(0.0)), Control("b", 0.0, figure(-0.04))], SPREAD)
        effect = blocks.ratio("a", "b", 0.0, 0.0)
        compared = blocks.compare(figure(0.0), figure(-0.04), effect)
        covered += compared.low <= 1.0 <= compared.high
    assert covered >= 0.93 * 300
    same = DeviceBlocks(controls("a", 1e6), SPREAD)
    alone = same.compare(1e6, 1e6, same.ratio("a", "a", 0.0, 0.0))
    assert compared.high - compared.low > alone.high - alone.low > 0
