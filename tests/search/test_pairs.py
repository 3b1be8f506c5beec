"""Verdicts from pairs of processes: what they conclude, and what may not change it."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.search.noise import Spread
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD, Pair, Side, disagrees, expected_gain, judge

LOGS = st.lists(st.floats(-0.05, 0.05), min_size=1, max_size=8)


def pairs(*log_ratios: float, error: float = 0.001) -> list[Pair]:
    return [Pair(Side(1e6 * math.exp(log), error), Side(1e6, error)) for log in log_ratios]


def test_the_ratio_is_the_geometric_mean_of_the_pairs() -> None:
    verdict = judge(pairs(math.log(1.5), math.log(2.0), math.log(3.0)))
    assert verdict.ratio == pytest.approx(9 ** (1 / 3))
    assert verdict.pairs == 3


@given(LOGS)
def test_the_other_way_round_everything_is_inverted(logs: list[float]) -> None:
    one = judge(pairs(*logs))
    other = judge([Pair(pair.other, pair.candidate) for pair in pairs(*logs)])
    assert other.ratio == pytest.approx(1 / one.ratio)
    assert (other.low, other.high) == pytest.approx((1 / one.high, 1 / one.low))
    assert {one.outcome, other.outcome} in ({"faster", "slower"}, {"tie"}, {"open"})


@given(LOGS, st.randoms())
def test_the_order_of_the_pairs_does_not_count(logs: list[float], chance: random.Random) -> None:
    shuffled = chance.sample(logs, len(logs))
    one, other = judge(pairs(*logs)), judge(pairs(*shuffled))
    assert (one.ratio, one.low, one.outcome) == (pytest.approx(other.ratio), pytest.approx(other.low), other.outcome)


@given(LOGS)
def test_more_comparisons_or_more_noise_never_decide_more(logs: list[float]) -> None:
    one = judge(pairs(*logs))
    for other in (
        judge(pairs(*logs), comparisons=3),
        judge(pairs(*logs), Spread(0.01, 4)),
        judge(pairs(*logs, error=0.01)),
    ):
        assert not (other.differs and not one.differs)
        assert other.high - other.low >= (one.high - one.low) * (1 - 1e-12)


@pytest.mark.parametrize("log", [0.5, -0.5])
def test_fewer_than_three_pairs_decide_nothing(log: float) -> None:
    assert judge(pairs(log)).outcome == judge(pairs(log, log)).outcome == "open"
    assert judge(pairs(log, log, log)).outcome == ("faster" if log > 0 else "slower")
    with pytest.raises(ValueError, match="no pair"):
        judge([])


def test_three_agreeing_pairs_are_not_believed_to_be_exact() -> None:
    verdict = judge(pairs(0.0, 0.0, 0.0))
    assert verdict.high - verdict.low > 0.005
    assert judge(pairs(0.002, 0.002, 0.002)).outcome == "open"


def test_three_pairs_tell_two_percent_and_what_they_cannot_tell_stays_open() -> None:
    assert judge(pairs(-0.018, -0.020, -0.022)).outcome == "slower"
    assert judge(pairs(-0.004, -0.003, -0.005)).outcome == "open"
    assert judge(pairs(0.03, -0.05, 0.08)).outcome == "open"


def test_each_of_several_verdicts_needs_more_than_a_single_one() -> None:
    close = pairs(-0.0105, -0.011, -0.0115)
    assert judge(close, comparisons=1).outcome == "slower"
    assert judge(close, comparisons=3).outcome == "open"


def test_equal_ones_become_a_tie_once_the_interval_is_narrow() -> None:
    logs = [0.004, -0.004, 0.005, -0.004, 0.003, -0.002, 0.001, -0.002]
    outcomes = [judge(pairs(*logs[:count])).outcome for count in range(1, 9)]
    assert outcomes[:3] == ["open"] * 3
    assert outcomes[-1] == "tie"
    assert sorted(set(outcomes)) == ["open", "tie"]


def test_a_pair_under_load_that_goes_another_way_is_told() -> None:
    short = pairs(0.050, 0.051, 0.049)
    (throttled,) = pairs(0.010)
    (same,) = pairs(0.048)
    assert disagrees(throttled, short, CAUTIOUS_SPREAD)
    assert not disagrees(same, short, CAUTIOUS_SPREAD)
    assert not disagrees(throttled, [], CAUTIOUS_SPREAD)


@pytest.mark.parametrize("centre", [-0.02, -0.004, 0.0, 0.003, 0.02])
def test_what_knowing_is_worth_is_what_a_simulation_says(centre: float) -> None:
    seen = pairs(centre - 0.003, centre, centre + 0.003)
    verdict = judge(seen)
    # The interval's half width is 1.94 errors at 6 degrees of freedom.
    error = math.log(verdict.high / verdict.low) / 2 / 1.943
    chance = random.Random(0)
    simulated = sum(max(0.0, chance.gauss(centre, error)) for _ in range(100_000)) / 100_000
    assert expected_gain(seen) == pytest.approx(simulated, rel=0.03, abs=2e-6)
    with pytest.raises(ValueError, match="no pair"):
        expected_gain([])
