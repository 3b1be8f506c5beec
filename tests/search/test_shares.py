"""Several studies' shares of one budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.search.shares import FAIR_MINIMUM, ROOM, Size, share

positive = st.floats(0.01, 1e6)
sizes = st.lists(st.tuples(positive, positive), min_size=1, max_size=5).map(
    lambda found: [Size(str(place), worth, seconds) for place, (worth, seconds) in enumerate(found)]
)


@given(sizes, st.floats(-10, 1e7))
def test_all_is_given_out_to_those_it_is_enough_for(found: list[Size], seconds: float) -> None:
    shares = share(found, seconds)
    assert shares.seconds.keys() | shares.left_out.keys() == {size.name for size in found}
    assert not shares.seconds.keys() & shares.left_out.keys()
    if shares.seconds:
        assert sum(shares.seconds.values()) == pytest.approx(seconds)
    for size in found:
        if size.name in shares.seconds:
            assert shares.seconds[size.name] >= ROOM * size.baseline_seconds
            assert shares.seconds[size.name] >= 0.999 * FAIR_MINIMUM * seconds / len(shares.seconds)


def test_what_is_worth_more_and_what_costs_more_to_measure_gets_more() -> None:
    given_out = share([Size("20m", 1, 20), Size("50m", 6, 25), Size("90m", 20, 35)], 3600).seconds
    assert given_out["20m"] < given_out["50m"] < given_out["90m"]
    assert given_out["20m"] >= 600, "half an equal share"
    dear = share([Size("quick", 1, 10), Size("slow", 1, 40)], 1000).seconds
    assert dear["slow"] - 250 == pytest.approx(2 * (dear["quick"] - 250)), "by the root of what it costs"


def test_one_alone_gets_everything() -> None:
    assert share([Size("20m", 5, 20)], 300).seconds == {"20m": pytest.approx(300)}


def test_one_that_cannot_fit_is_left_out_and_its_share_is_the_others() -> None:
    shares = share([Size("20m", 1, 20), Size("500m", 400, 4000), Size("50m", 6, 25)], 600)
    assert list(shares.left_out) == ["500m"]
    assert sum(shares.seconds.values()) == pytest.approx(600)
    assert shares.left_out["500m"].startswith("its baseline and another would take about 8000 s, and its share is ")


def test_where_time_is_short_for_all_the_neediest_goes_first_so_that_another_fits() -> None:
    shares = share([Size("a", 1, 30), Size("b", 1, 40)], 100)
    assert list(shares.left_out) == ["b"]
    assert shares.seconds == {"a": pytest.approx(100)}


def test_one_that_has_measured_wants_time_for_one_more_and_says_so() -> None:
    assert share([Size("a", 1, 30, begun=True)], 31).seconds == {"a": pytest.approx(31)}
    assert share([Size("a", 1, 30)], 31).seconds == {}
    assert share([Size("a", 1, 30, begun=True)], 29).left_out == {
        "a": "one more measurement would take about 30 s, and its share is 29 s"
    }


def test_without_time_all_are_left_out() -> None:
    shares = share([Size("a", 1, 30), Size("b", 1, 40)], -3)
    assert shares.seconds == {}
    assert set(shares.left_out) == {"a", "b"}
