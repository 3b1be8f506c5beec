"""What a person sees: both displays show the same study."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from tinyllm_ray.tune.live import LiveTable, PlainLines, open_display
from tinyllm_ray.tune.table import Row, View

ROWS = [
    Row("c01", "mb32 compiled default auto t8", "complete", "", 1_900_000.4, 1.0, 31.0),
    Row("c02", "mb32 eager auto t8", "running", "window 2", None, None, None),
    Row("c03", "mb64 eager auto t8", "out_of_memory", "OutOfMemoryError: 90 GiB", None, None, 4.0),
]


def console(terminal: bool, width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def look() -> View:
    return View("20M", ROWS, seconds_left=125.4)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_study_is_shown_with_its_figures_and_the_time_left(terminal: bool) -> None:
    screen = console(terminal)
    with open_display(screen, look) as display:
        display.say("space smoke: no GPU here [sic]")
        for row in ROWS:
            display.show(row)
    shown = text(screen)
    assert "space smoke: no GPU here [sic]" in shown
    assert "2m05s left" in shown
    for row in ROWS:
        assert row.label in shown
        assert row.state in shown
        assert row.detail in shown
    assert "1,900,000" in shown
    assert "1.00x" in shown


def test_a_pipe_gets_a_line_an_event_and_no_control_codes() -> None:
    screen = console(terminal=False, width=20)
    with open_display(screen, look) as display:
        for row in ROWS:
            display.show(row)
    lines = text(screen).splitlines()
    assert len(lines) == len(ROWS)
    assert "\x1b" not in text(screen)
    assert lines[0] == "[2m05s left] mb32 compiled default auto t8: complete  1,900,000 targets/s 1.00x"
    assert lines[2] == "[2m05s left] mb64 eager auto t8: out_of_memory  (OutOfMemoryError: 90 GiB)"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    screen = console(terminal=True, width=width)
    with LiveTable(screen, look) as display:
        display.show(ROWS[0])
    for line in text(screen).splitlines():
        visible = line.split("\r")[-1].replace("\x1b[2K", "").replace("\x1b[?25l", "").replace("\x1b[?25h", "")
        assert len(visible.replace("\x1b[1A", "")) <= width


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    displays: list[Callable] = [type(open_display(console(terminal=True), look))]
    assert displays == [PlainLines]
