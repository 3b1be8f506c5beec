"""That windows by need stop what is slower, and hardly ever what equals the best, however noisy windows are."""

import math

import pytest
from windows_by_need import figures


@pytest.mark.parametrize("half_range", [0.002, 0.016])
def test_what_equals_the_best_is_not_stopped(half_range: float) -> None:
    """The best is the luckiest of four, and goes on to be asked about after every window."""
    assert figures(math.nan, half_range, 0.0, 4, 60)["stopped"] <= 0.05


def test_what_is_a_tenth_slower_is_stopped_in_a_fraction_of_the_time() -> None:
    found = figures(math.nan, 0.005, 0.1, 4, 30)
    assert found["stopped"] == 1
    assert found["seconds"] < found["seconds_by_count"] / 3
