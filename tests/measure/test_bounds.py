"""Bounds of a throughput cover it as often as they say, under the noise they assume and a good deal more."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.measure.bounds import PROCESS_SPREAD, throughput_bounds, window_error

RATES = st.lists(st.floats(1e3, 1e7), min_size=1, max_size=12)


def coverage(windows: int, window_spread: float, process_spread: float, outliers: float = 0.0) -> float:
    random.seed(windows)
    hits = 0
    for _ in range(1000):
        process = random.gauss(0, process_spread)
        logs = [process + random.gauss(0, window_spread) for _ in range(windows)]
        logs = [value - 0.05 if random.random() < outliers else value for value in logs]
        bounds = throughput_bounds([1e6 * math.exp(value) for value in logs])
        hits += bounds.low <= 1e6 <= bounds.high
    return hits / 1000


@pytest.mark.parametrize("windows", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("window_spread", [0.001, 0.004, 0.007])
def test_the_bounds_cover_the_truth(windows: int, window_spread: float) -> None:
    assert coverage(windows, window_spread, PROCESS_SPREAD) >= 0.93


@pytest.mark.parametrize("windows", [2, 3, 6])
def test_noisy_windows_and_outliers_widen_them(windows: int) -> None:
    assert coverage(windows, 0.010, PROCESS_SPREAD) >= 0.9
    assert coverage(windows, 0.004, PROCESS_SPREAD, outliers=0.05) >= 0.9


@given(RATES, st.floats(0, 0.02))
def test_they_lie_around_the_median_and_grow_with_the_spread_of_processes(rates: list[float], spread: float) -> None:
    narrow, wide = throughput_bounds(rates, spread), throughput_bounds(rates, spread + 0.001)
    assert narrow.rate == wide.rate == statistics.median(rates)
    assert wide.low < narrow.low < narrow.rate < narrow.high < wide.high


def test_no_number_of_windows_averages_the_spread_of_processes_away() -> None:
    bounds = throughput_bounds([1e6] * 10_000)
    assert bounds.high / bounds.rate - 1 == pytest.approx(1.96 * PROCESS_SPREAD, rel=0.02)


def test_windows_that_agree_by_chance_are_not_believed_to_be_exact() -> None:
    assert window_error([1e6, 1e6]) > 0.003
    assert window_error([1e6, 0.9e6]) > 0.02


def test_without_windows_there_are_no_bounds() -> None:
    with pytest.raises(ValueError, match="no window"):
        throughput_bounds([])
