"""What a training may expect: a figure under load before others, and an interval that holds a further process."""

import random

import pytest

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord, Window
from tinyllm_ray.search.expected import expected_rate
from tinyllm_ray.search.noise import Spread

SPREAD = Spread(0.004, 1000)


def record(rate: float, loaded: bool = False, fate: Fate = Fate.COMPLETE, window_rates: tuple[float, ...] = ()):
    seconds = 60.0 if loaded else 0.0
    windows = [
        Window(
            index=index,
            updates=1,
            targets=1,
            seconds=1.0,
            targets_per_second=each,
            data_wait_seconds=0.0,
            loss=1.0,
            grad_norm=1.0,
            timestamp=0.0,
        )
        for index, each in enumerate(window_rates)
    ]
    return TrialRecord(
        study="s",
        candidate="c01",
        kind="measurement",
        fate=fate,
        recipe_identity="r",
        execution_identity="e",
        cache_identity=None,
        source_identity="s",
        source_dirty=None,
        execution={},
        protocol=Protocol(version="adaptive", least_seconds=seconds),
        windows=windows,
        targets_per_second=rate,
        timestamp=0.0,
    )


def test_without_repeats_it_is_what_the_search_measured() -> None:
    found = expected_rate(record(1000.0), [], SPREAD)
    assert (found.rate, found.processes, found.verified) == (pytest.approx(1000.0), 1, False)
    assert found.low < 1000.0 < found.high


def test_repeats_count_and_the_search_does_not() -> None:
    """The search's figure is the best of many, and flatters."""
    found = expected_rate(record(1100.0), [record(990.0), record(1010.0), record(1.0, fate=Fate.TIMED_OUT)], SPREAD)
    assert (found.processes, found.verified) == (2, True)
    assert found.rate == pytest.approx((990 * 1010) ** 0.5)


def test_a_minutes_load_counts_alone() -> None:
    found = expected_rate(record(1100.0), [record(1000.0), record(1000.0), record(970.0, loaded=True)], SPREAD)
    assert (found.rate, found.processes) == (pytest.approx(970.0), 1)


def test_noisy_windows_widen_the_interval() -> None:
    calm = expected_rate(record(1000.0, window_rates=(1000.0, 1000.0, 1000.0)), [], SPREAD)
    noisy = expected_rate(record(1000.0, window_rates=(900.0, 1000.0, 1100.0)), [], SPREAD)
    assert noisy.high - noisy.low > 2 * (calm.high - calm.low)


@pytest.mark.parametrize("count", [1, 3])
def test_the_interval_holds_the_next_process_nine_times_in_ten(count: int) -> None:
    dice = random.Random(0)
    held = 0
    for _ in range(2000):
        rates = [1000.0 * (1 + dice.gauss(0, SPREAD.value)) for _ in range(count)]
        found = expected_rate(record(1.0), [record(rate) for rate in rates], SPREAD)
        held += found.low <= 1000.0 * (1 + dice.gauss(0, SPREAD.value)) <= found.high
    assert 0.88 <= held / 2000 <= 0.92
