"""Event files, read back by TensorBoard's own reader."""

import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import FakeClock
from full_disk import full_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tinyllm_ray.train.event_files import EventFiles


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: tag -> (step, value)."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def steps(folder: Path, tag: str = "loss") -> list[int]:
    return [step for step, _ in shown(folder)[tag]]


def write(folder: Path, first: int, last: int, value: float, purge_step: int | None = None) -> None:
    events = EventFiles(folder, purge_step)
    for step in range(first, last + 1):
        events.add(step, {"loss": value})
    events.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class TestScalars:
    def test_come_back_by_tag_and_step(self, tmp_path: Path) -> None:
        events = EventFiles(tmp_path / "run" / "tensorboard")
        events.add(1, {"loss": 5.5, "lr": 0.25})
        events.add(2, {"loss": 4.5, "lr": 0.5})
        events.add(2, {"validation_loss": 4.25})
        events.add(10**9, {"loss": math.inf})
        events.close()
        assert shown(tmp_path / "run" / "tensorboard") == {
            "loss": [(1, 5.5), (2, 4.5), (10**9, math.inf)],
            "lr": [(1, 0.25), (2, 0.5)],
            "validation_loss": [(2, 4.25)],
        }

    def test_that_are_no_number_are_shown_as_such(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 1, math.nan)
        ((step, value),) = shown(tmp_path)["loss"]
        assert step == 1
        assert math.isnan(value)


class TestKilled:
    """A file that nobody closes is what a killed process leaves."""

    def test_loses_five_seconds_at_most(self, tmp_path: Path) -> None:
        clock = FakeClock()
        events = EventFiles(tmp_path, clock=clock)
        for step in range(1, 10):
            events.add(step, {"loss": 1.0})
            clock.advance(2.0)
        assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7], "flushed with steps 4 and 7, 6 s each"
        events.close()

    def test_keeps_what_was_flushed(self, tmp_path: Path) -> None:
        events = EventFiles(tmp_path, clock=FakeClock())
        events.add(1, {"loss": 1.0})
        events.flush()
        events.add(2, {"loss": 1.0})
        assert steps(tmp_path) == [1]
        events.close()
        assert steps(tmp_path) == [1, 2]

    def test_in_the_middle_of_a_record_it_goes_on_in_another_file(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 3, value=1.0)
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes()[:-3])
        write(tmp_path, 3, 4, value=2.0, purge_step=3)
        assert shown(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


class TestResumed:
    def test_doubles_no_step(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 50, value=1.0)
        write(tmp_path, 31, 40, value=2.0, purge_step=31)
        assert shown(tmp_path)["loss"] == [(step, 1.0 if step <= 30 else 2.0) for step in range(1, 41)]

    def test_drops_other_tags_from_there_on_too(self, tmp_path: Path) -> None:
        events = EventFiles(tmp_path)
        for step in (30, 31, 40):
            events.add(step, {"subset_loss": float(step)})
        events.close()
        write(tmp_path, 31, 31, value=2.0, purge_step=31)
        assert steps(tmp_path, "subset_loss") == [30]

    def test_again_and_again_within_a_second_keeps_the_order(self, tmp_path: Path) -> None:
        """Eleven files, so that the tenth would come before the second if names were compared without zeros."""
        write(tmp_path, 1, 2, value=0.0)
        for session in range(1, 11):
            write(tmp_path, 2, 3, value=float(session), purge_step=2)
        assert shown(tmp_path)["loss"] == [(1, 0.0), (2, 10.0), (3, 10.0)]

    def test_overwrites_no_file_where_an_older_one_was_removed(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 1, value=1.0)
        write(tmp_path, 2, 2, value=2.0)
        min(tmp_path.iterdir()).unlink()
        write(tmp_path, 3, 3, value=3.0)
        assert shown(tmp_path)["loss"] == [(2, 2.0), (3, 3.0)]


class TestDisk:
    def test_that_is_full_costs_a_warning_and_no_run(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        events = EventFiles(tmp_path)
        events.add(1, {"loss": 1.0})
        events.flush()
        with full_disk():
            for step in range(2, 2000):  # past the file's buffer, so that writing fails as well as flushing
                events.add(step, {"loss": 1.0})
            events.flush()
            events.flush()
        (warning,) = warnings(caplog)
        assert "no more TensorBoard events" in warning
        assert str(tmp_path) in warning
        events.add(3, {"loss": 1.0})
        events.close()
        events.close()
        assert steps(tmp_path)[0] == 1
        assert len(warnings(caplog)) == 1

    def test_that_is_full_at_the_end_costs_no_more(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        events = EventFiles(tmp_path)
        events.add(1, {"loss": 1.0})
        with full_disk():
            events.close()
        assert len(warnings(caplog)) == 1

    def test_whose_folder_was_removed_is_noticed(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Writing to a file that has no name any more raises nothing."""
        events = EventFiles(tmp_path / "tensorboard")
        shutil.rmtree(tmp_path / "tensorboard")
        events.add(1, {"loss": 1.0})
        events.flush()
        events.add(2, {"loss": 1.0})
        events.close()
        (warning,) = warnings(caplog)
        assert "No such file or directory" in warning

    def test_that_cannot_be_written_from_the_start_costs_no_run(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("")
        events = EventFiles(tmp_path / "file", purge_step=3)
        events.add(1, {"loss": 1.0})
        events.close()
        assert len(warnings(caplog)) == 1


def test_the_library_is_imported_only_when_asked_for() -> None:
    code = "import sys, tinyllm_ray.train.event_files; sys.exit('tensorboardX' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
