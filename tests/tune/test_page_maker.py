"""The page's own process: pages while a study goes on, the last at its end, and never in the study's way."""

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fakes import FakeClock
from page_studies import h200_first_study, write_study

from tinyllm_ray.clock import Deadline
from tinyllm_ray.tune.page.maker import PageMaker, bring_up_to_date, serve


class Maker:
    """Counts pages, each of which takes some time and may bring requests of its own."""

    def __init__(self, clock: FakeClock, seconds: float = 0.0) -> None:
        self.clock, self.seconds = clock, seconds
        self.made: list[float] = []

    def __call__(self, out: Path) -> None:
        self.made.append(self.clock.now)
        self.clock.advance(self.seconds)


def test_requests_that_come_together_make_one_page_and_the_last_is_made_at_the_end() -> None:
    clock = FakeClock()
    reading, writing = os.pipe()
    os.write(writing, b"\n" * 5)
    make = Maker(clock)

    def and_go_on(out: Path) -> None:
        make(out)
        if len(make.made) == 1:
            os.write(writing, b"\n\n")  # what changes while a page is made
            os.close(writing)

    serve(Path("out"), reading, and_go_on, clock)
    # The second within the rest, since requests have ended: nobody would make it later.
    assert len(make.made) == 2
    os.close(reading)


@pytest.mark.parametrize(("cost", "rest"), [(0.2, 5.0), (1.0, 20.0)])
def test_pages_keep_apart_in_proportion_to_what_they_cost(cost: float, rest: float) -> None:
    clock = FakeClock()
    reading, writing = os.pipe()
    make = Maker(clock, cost)
    os.write(writing, b"\n")

    def busy_clock() -> float:
        """A study that asks all the time, for a minute."""
        clock.advance(0.1)
        if clock.now < 1060:
            os.write(writing, b"\n")
        elif not closed:
            closed.append(True)
            os.close(writing)
        return clock.now

    closed: list[bool] = []
    serve(Path("out"), reading, make, busy_clock)
    gaps = [later - earlier for earlier, later in itertools.pairwise(make.made)]
    assert all(gap >= rest for gap in gaps[:-1])
    assert 60 / (rest + 1) - 1 <= len(make.made) <= 60 / rest + 2
    os.close(reading)


def test_the_page_is_made_by_a_process_of_its_own_and_stands_at_the_end(tmp_path: Path) -> None:
    write_study(tmp_path, *h200_first_study())
    said: list[str] = []
    maker = PageMaker(tmp_path, said.append)
    maker.ask()
    maker.finish(60.0)
    assert "1.89 M" in (tmp_path / "report.html").read_text()
    assert said == []
    maker.ask()  # after the end: nothing is started again


def test_slurms_signal_to_every_process_of_a_job_costs_no_page(tmp_path: Path) -> None:
    write_study(tmp_path, *h200_first_study())
    said: list[str] = []
    maker = PageMaker(tmp_path, said.append)
    maker.ask()
    page = tmp_path / "report.html"
    while not page.exists():
        assert said == []
        maker.ask()
        time.sleep(0.02)
    assert maker._process is not None
    os.kill(maker._process.pid, signal.SIGTERM)
    page.unlink()
    maker.finish(60.0)
    assert said == []
    assert page.exists()


def test_a_page_that_cannot_be_made_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    write_study(tmp_path, [], None)
    (tmp_path / "trials.jsonl").write_text("no record\n{}\n")
    said: list[str] = []
    maker = PageMaker(tmp_path, said.append)
    maker.ask()
    maker.finish(60.0)
    maker.ask()
    (line,) = said
    assert "report.html cannot be made" in line
    assert "line 1 is damaged" in line


def test_a_process_that_hangs_does_not_hold_up_the_studys_end(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").touch()
    os.mkfifo(tmp_path / "summary.json")  # reading it blocks for ever
    maker = PageMaker(tmp_path, lambda line: None)
    maker.ask()
    maker.finish(0.1)  # hangs for ever otherwise


def test_a_page_that_not_even_a_kill_ends_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that hangs: nothing is waited for without an end."""
    write_study(tmp_path, *h200_first_study())
    waited: list[float | None] = []

    class Stuck(subprocess.Popen[bytes]):
        def __init__(self, *_: object, **__: object) -> None:
            self.returncode: int | None = None

        def wait(self, timeout: float | None = None) -> int:
            waited.append(timeout)
            raise subprocess.TimeoutExpired("report", timeout or 0.0)

        def poll(self) -> int | None:
            return None

        def kill(self) -> None:
            waited.append(0.0)

        def __del__(self) -> None:
            """Nothing was started."""

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    bring_up_to_date(tmp_path, Deadline.after(600.0))
    assert waited == [10.0, 0.0, 0.2]


def test_a_folder_that_is_gone_is_said_and_stops_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    maker = PageMaker(tmp_path / "gone", said.append)
    maker.finish(60.0)
    assert len(said) == 1


def test_the_page_of_an_ended_study_is_brought_up_to_date_once_and_only_within_the_deadline(tmp_path: Path) -> None:
    write_study(tmp_path, *h200_first_study())
    page = tmp_path / "report.html"
    bring_up_to_date(tmp_path, Deadline.after(2.0))
    assert not page.exists()
    bring_up_to_date(tmp_path, Deadline.after(600.0))
    made = page.stat().st_mtime_ns
    bring_up_to_date(tmp_path, Deadline.after(600.0))
    assert page.stat().st_mtime_ns == made
    bring_up_to_date(tmp_path / "nothing", Deadline.after(600.0))
    assert not (tmp_path / "nothing").exists()
