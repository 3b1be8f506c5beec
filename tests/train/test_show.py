"""What a person sees: lines in a log, bars in a terminal, both by a clock that stands still."""

import io
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest
from fakes import FakeClock
from rich.console import Console

from tinyllm_ray.train.progress import Evaluating, Event, Progress, Starting
from tinyllm_ray.train.show import progress_line

COMPILING = Starting("compiling the first update")


def update(updates: int, of: int = 100, loss: float = 5.0) -> Progress:
    return Progress(updates, of, loss, 1_234_567.0)


def show(events: Iterable[tuple[float, Event]], terminal: bool) -> str:
    """Everything that was written for events at their seconds."""
    clock, file = FakeClock(0.0), io.StringIO()
    with progress_line(Console(file=file, force_terminal=terminal, color_system=None, width=100), clock) as report:
        for at, event in events:
            clock.advance(at - clock.now)
            report(event)
    return file.getvalue()


def in_a_log(*events: tuple[float, Event]) -> list[str]:
    return show(events, terminal=False).splitlines()


def in_a_terminal(*events: tuple[float, Event]) -> list[str]:
    """The bars of the last picture, which is drawn after the last line of the one before was erased."""
    picture = show(events, terminal=True).rpartition("\x1b[2K")[2]
    return re.sub(r"\x1b\[[?0-9;]*[a-z]", "", picture).strip().splitlines()


class TestLog:
    def test_says_every_stage_of_the_start_at_once(self) -> None:
        assert in_a_log((0, Starting("building the model")), (1, COMPILING)) == [
            "starting: building the model",
            "starting: compiling the first update",
        ]

    def test_says_the_first_update_and_the_last_and_one_every_ten_seconds(self) -> None:
        events = [(float(number), update(number, of=24)) for number in range(1, 25)]
        assert in_a_log(*events) == [
            "update 1/24  loss 5.0000  1,234,567 targets/s",
            "update 11/24  loss 5.0000  1,234,567 targets/s  13s left",
            "update 21/24  loss 5.0000  1,234,567 targets/s  3s left",
            "update 24/24  loss 5.0000  1,234,567 targets/s",
        ]

    def test_does_not_judge_what_is_left_by_the_update_that_compiled(self) -> None:
        """One update in 90 s, then two a second."""
        *_, line = in_a_log((0, COMPILING), (90, update(1)), (100, update(21)), (105, update(31)), (110, update(41)))
        assert line.endswith("  30s left")

    def test_counts_a_resumed_run_from_where_it_began(self) -> None:
        lines = in_a_log((0, update(501, of=1000)), (10, update(601, of=1000)))
        assert lines[0].startswith("update 501/1000  ")
        assert lines[1].endswith("  40s left")

    def test_says_how_far_a_long_validation_is(self) -> None:
        events = [(float(at), Evaluating("validation", 1_000_000 * at, 50_000_000)) for at in range(51)]
        assert in_a_log(*events) == [
            f"validation {at * 2}%  1,000,000 targets/s  {50 - at}s left" for at in (10, 20, 30, 40, 50)
        ]

    def test_says_nothing_of_a_short_evaluation(self) -> None:
        lines = in_a_log((0, update(1)), (1, Evaluating("epoch 1", 64, 128)), (2, Evaluating("epoch 1", 128, 128)))
        assert lines == ["update 1/100  loss 5.0000  1,234,567 targets/s"]

    def test_gives_an_evaluation_its_own_pace(self) -> None:
        """The first ran at ten targets a second; the second, after other things, at a hundred."""
        first = [(float(at), Evaluating("subset", 10 * at, 100)) for at in range(11)]
        second = [(float(at), Evaluating("subset", 100 * (at - 50), 10_000)) for at in range(50, 61)]
        other = [(float(at), Evaluating("validation", 1000 * (at - 59), 100_000)) for at in range(60, 71)]
        assert in_a_log(*first, *second, *other) == [
            "subset 100%  10 targets/s  0s left",
            "subset 0%",
            "subset 10%  100 targets/s  1m30s left",
            "validation 11%  1,000 targets/s  1m29s left",
        ]

    def test_promises_nothing_before_something_was_done(self) -> None:
        assert in_a_log((0, Evaluating("validation", 0, 100)), (20, Evaluating("validation", 0, 100))) == [
            "validation 0%"
        ]

    def test_breaks_no_line_and_reads_no_markup(self) -> None:
        stage = "[bold] " + 40 * "long " + "end"
        assert in_a_log((0, Starting(stage))) == [f"starting: {stage}"]

    def test_goes_to_standard_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        with progress_line() as report:
            report(COMPILING)
        assert capsys.readouterr() == ("", "starting: compiling the first update\n")


class TestTerminal:
    def test_shows_what_the_start_does(self) -> None:
        (bar,) = in_a_terminal((0, COMPILING), (1, Starting("[bold] the model")))
        assert bar.startswith("starting: [bold] the model ")

    def test_shows_training_and_its_time_left(self) -> None:
        (bar,) = in_a_terminal((0, COMPILING), (60, update(1)), (61, update(11)), (62, update(21)))
        assert bar.startswith("loss 5.0000  1,234,567 targets/s ")
        assert bar.split()[-2:] == ["21/100", "0:00:08"]

    def test_shows_an_evaluation_below_training(self) -> None:
        training, evaluation = in_a_terminal(
            (0, update(50)),
            (1, Evaluating("validation", 0, 1000)),
            (2, Evaluating("validation", 170, 1000)),
            (3, Evaluating("validation", 340, 1000)),
        )
        assert training.startswith("loss 5.0000")
        assert evaluation.startswith("validation 34%  170 targets/s ")
        assert evaluation.split()[-1] == "0:00:04"

    @pytest.mark.parametrize("end", [Evaluating("subset", 100, 100), update(51)])
    def test_drops_an_evaluation_that_is_over(self, end: Event) -> None:
        (bar,) = in_a_terminal((0, update(50)), (1, Evaluating("subset", 50, 100)), (2, end))
        assert bar.startswith("loss 5.0000")

    def test_shows_one_evaluation_at_a_time(self) -> None:
        lines = in_a_terminal((0, update(50)), (1, Evaluating("a", 1, 9)), (2, Evaluating("b", 1, 9)))
        assert [line.split()[0] for line in lines] == ["loss", "b"]


def test_a_run_needs_no_display() -> None:
    code = "import sys, tinyllm_ray.train.run; sys.exit('tinyllm_ray.train.show' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
