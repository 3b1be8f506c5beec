"""Progress: a bar in a terminal, a line now and then elsewhere."""

import sys

import pytest

from tinyllm_ray.data.prepare import _progress
from tinyllm_ray.data.progress import reporter
from tinyllm_ray.data.sources import Meter
from tinyllm_ray.data.write import Totals


class Clock:
    """Stands where it was put."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_lines_come_when_a_stage_begins_and_now_and_then(clock, capsys):
    with reporter("title", clock) as report:
        for second in range(0, 31, 3):
            clock.now = float(second)
            report("work", 10 + second, 100, "detail")
            report("other", 0, None)
    assert capsys.readouterr().err.splitlines() == [
        "title: work",
        "title: other",
        "title: work: detail, 22%, 1m18s left",
        "title: work: detail, 34%, 1m06s left",
    ]


def test_without_a_total_no_time_is_promised(clock, capsys):
    with reporter("title", clock) as report:
        report("work", 0, None)
        clock.now = 11.0
        report("work", 5000, None)
        clock.now = 22.0
        report("work", 60, 50)
    assert capsys.readouterr().err.splitlines() == ["title: work", "title: work: 5,000", "title: work: 60 of 50, 100%, 0s left"]  # fmt: skip  # noqa: E501


def test_speed_counts_this_session_alone(clock):
    shown = []
    meter = Meter(total=1000)
    show = _progress(meter, lambda *arguments: shown.append(arguments), clock)
    clock.now = 5.0
    show(Totals(100, 2_000, 50_000_000))
    clock.now = 7.0
    meter.advance(400)
    show(Totals(150, 3_000, 56_000_000))
    assert shown[-1] == ("tokenizing", 400, 1000, "150 documents, 3,000 tokens, 3.0 MB/s")


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with reporter("title") as report:
        report("work", 0, 10)
        report("work", 5, 10, "half of it")
    said = capsys.readouterr().err
    assert said.startswith("title")
    assert "half of it" in said
    assert "left" in said
