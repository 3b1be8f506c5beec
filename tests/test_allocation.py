"""The deadline is the smaller of the budget and the allocation's time left less a margin."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.allocation import (
    END_VARIABLE,
    MARGIN_SECONDS,
    allocation_seconds_left,
    seconds_within_allocation,
    within_allocation,
)
from tinyllm_ray.clock import Deadline
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.tune.__main__ import main


def within(budget: float, left: float) -> float:
    return seconds_within_allocation(budget, {END_VARIABLE: "2000000000"}, now=lambda: 2_000_000_000 - left)


@pytest.mark.parametrize("text", ["", "0", "soon", "-5", "1.5", "١٢"])
def test_without_a_known_end_the_budget_is_all(text: str) -> None:
    assert allocation_seconds_left({END_VARIABLE: text}) is None
    assert seconds_within_allocation(2700, {END_VARIABLE: text}) == 2700
    assert seconds_within_allocation(2700, {}) == 2700


def test_a_budget_that_fits_is_kept_and_a_longer_one_ends_a_minute_before_the_allocation() -> None:
    assert within(2700, left=3600) == 2700
    assert within(2700, left=2750) == 2690
    assert within(7200, left=3600) == 3600 - MARGIN_SECONDS


def test_a_short_allocation_gives_a_tenth_away() -> None:
    assert within(2700, left=120) == pytest.approx(108)


def test_a_deadline_moves_to_what_is_left_of_the_allocation_and_never_later() -> None:
    deadline = Deadline(5000.0, lambda: 4000.0)
    assert within_allocation(deadline, {}) == deadline
    short = within_allocation(deadline, {END_VARIABLE: str(int(time.time()) + 600)})
    assert (short.at, short.clock) == (pytest.approx(4540, abs=2), deadline.clock)
    long = within_allocation(deadline, {END_VARIABLE: str(int(time.time()) + 6000)})
    assert long == deadline


def test_an_allocation_that_is_over_is_refused_with_the_variable() -> None:
    with pytest.raises(ConfigError, match=rf"ended 5s ago \({END_VARIABLE}=2000000000\)"):
        within(2700, left=-5)


@given(st.floats(0.1, 1e6), st.floats(0.1, 1e6))
def test_it_is_never_beyond_the_budget_nor_the_allocation(budget: float, left: float) -> None:
    seconds = within(budget, left)
    assert 0 < seconds <= budget
    assert seconds < left


def test_a_study_in_an_allocation_that_is_over_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(END_VARIABLE, "1700000000")
    assert main(["--budget", "45m", "--out", str(tmp_path / "study")]) == 2
    assert capsys.readouterr().err.startswith("error: the Slurm allocation ended")
    assert list(tmp_path.iterdir()) == []
