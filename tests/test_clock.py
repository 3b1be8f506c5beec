"""Durations as people and Slurm write them, and deadlines over a clock."""

import pytest
from fakes import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.clock import Deadline, format_duration, parse_duration, parse_slurm_time
from tinyllm_ray.errors import EXIT_USER, ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("45m", 2700),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2h", 7200),
        ("1h2m3s", 3723),
        ("1h02m05s", 3725),
        ("1h30s", 3630),
        ("0h5m", 300),
        ("0.5s", 0.5),
        (" 45m\n", 2700),
    ],
)
def test_durations_with_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "45",
        "2700",
        "1h30",
        "10H",
        "45M",
        "45min",
        "5m1h",
        "1h1h",
        "1h 30m",
        "-5",
        "-5m",
        "+5m",
        "0",
        "0s",
        "0h0m0s",
        ".5h",
        "1.h",
        "1e3s",
        "1,5h",
        "infs",
        "nan",
        "h",
        "\u0664\u0665m",  # digits to Unicode, but to no Slurm
        "9" * 20 + "s",
        "1:00:00",
    ],
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration(text, "--budget")
    assert caught.value.exit_status == EXIT_USER
    assert str(caught.value).startswith(f"--budget: {text!r} ")
    assert "45m" in str(caught.value)


@given(st.text(alphabet="0123456789.hmsHMS -+e", max_size=12))
def test_a_duration_is_refused_or_positive_and_finite(text: str) -> None:
    try:
        seconds = parse_duration(text)
    except ConfigError:
        return
    assert 0 < seconds < float("inf")
    assert text.strip()[-1] in "hms"


@given(st.integers(min_value=1, max_value=10**7))
def test_a_formatted_duration_reads_back(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-3, "0s"), (5.4, "5s"), (59.7, "1m00s"), (125, "2m05s"), (2700, "45m00s"), (3599.6, "1h00m00s")],
)
def test_formatting(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600),
        ("4:00", 240),
        ("1:00:00", 3600),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("1-02:03:04", 93_784),
        ("3-0:00", 259_200),
        ("0:00", 0),
        (" 59:59\n", 3599),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_slurm_times(text: str, seconds: float | None) -> None:
    assert parse_slurm_time(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "-", "2-", "-12", "1:2:3:4", "1-2:3:4:5", "4.5", "45m", "INVALID", "NOT_SET", "\u0664", "9" * 20]
)
def test_what_is_no_slurm_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Slurm time"):
        parse_slurm_time(text)


@given(st.integers(0, 364), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_slurm_times_read_back(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert parse_slurm_time(f"{days}-{hours:02d}:{minutes:02d}:{seconds:02d}") == total


def test_a_deadline_counts_down_and_past_zero() -> None:
    clock = FakeClock()
    deadline = Deadline.after(10, clock)
    assert deadline.remaining() == 10
    clock.advance(4)
    assert deadline.remaining() == 6
    assert deadline.earlier_by(2).remaining() == 4
    clock.advance(7)
    assert deadline.remaining() == -1
