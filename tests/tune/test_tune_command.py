"""The tuner's command line, up to where the supervisor takes over."""

import time
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.clock import Deadline
from tinyllm_ray.tune import __main__ as command
from tinyllm_ray.tune.going_on import going_on
from tinyllm_ray.tune.supervisor import Outcome

HOUR = ("--budget", "1h", "--preset", "nano")


class Supervised:
    """In place of the supervisor: keeps what it was asked, and ends as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path, exit_status: int = 0) -> None:
        self.request: dict[str, Any] = {}
        self.seconds_left = 0.0
        self.outcome = Outcome(exit_status, False, None, 1.0, (), out / "trials.jsonl", mirrored=False)
        monkeypatch.setattr(command, "supervise", self)

    def __call__(self, words: object, *, request: dict[str, Any], deadline: Deadline) -> Outcome:
        self.request, self.seconds_left = request, deadline.remaining()
        return self.outcome


def test_what_a_slow_folder_took_to_tell_the_rest_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ages = [5.0]

    def slowly(total: float, out: Path, resume: bool) -> float:
        ages.append(12.0)
        return total - 600

    monkeypatch.setattr(command, "seconds_left", slowly)
    monkeypatch.setattr(command, "process_age_seconds", lambda: ages[-1])
    supervised = Supervised(monkeypatch, tmp_path)
    assert command.main([*HOUR, "--out", str(tmp_path), "--resume"]) == 0
    assert supervised.request["age_seconds"] == pytest.approx(12.0, abs=1)
    assert supervised.seconds_left == pytest.approx(3600 - 600 - 12, abs=1)


def test_all_that_passes_before_the_supervisor_starts_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preempted(deadline: Deadline, environment: object) -> Deadline:
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        return deadline

    monkeypatch.setattr(command, "within_allocation", preempted)
    monkeypatch.setattr(command, "process_age_seconds", lambda: 12.0)
    supervised = Supervised(monkeypatch, tmp_path)
    assert command.main([*HOUR, "--out", str(tmp_path)]) == 0
    assert supervised.request["age_seconds"] >= 12.05
    assert supervised.seconds_left <= 3600 - supervised.request["age_seconds"]


def test_resuming_wants_the_study_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The default folder's name is the time, so nothing is there to go on with."""
    Supervised(monkeypatch, Path("unused"))
    assert command.main([*HOUR, "--resume"]) == 2
    assert capsys.readouterr().err == "error: --resume: which study? name its folder with --out\n"


@pytest.mark.parametrize(
    ("exit_status", "said"), [(0, False), (1, True), (2, False), (3, False), (130, True), (143, True)]
)
def test_an_early_end_is_answered_with_the_way_to_go_on(
    exit_status: int, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Supervised(monkeypatch, tmp_path, exit_status)
    assert command.main([*HOUR, "--out", str(tmp_path)]) == exit_status
    assert capsys.readouterr().err.startswith("go on, with ") is said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "1h"], "--budget 1h --out studies/x --resume"),
        (["--budget", "1h", "--out=a b"], "--budget 1h '--out=a b' --resume"),
        (["--resume", "--out", "x", "--set", "data.cache=a b"], "--resume --out x --set 'data.cache=a b'"),
    ],
)
def test_the_command_is_the_one_that_was_given_and_what_it_lacks(arguments: list[str], words: str) -> None:
    line = going_on(arguments, Path("studies/x"), 130, 125.0)
    assert line == f"go on, with 2m05s left of the budget: python -m tinyllm_ray.tune {words}"


def test_an_option_goes_by_its_whole_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A job that comes back looks for --out, and would go on in another folder than `--ou` named."""
    with pytest.raises(SystemExit) as ended:
        command.main(["--budget", "1h", "--ou", "x"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --ou x" in capsys.readouterr().err


def test_nothing_is_said_where_nothing_is_left() -> None:
    assert going_on(["--budget", "1h"], Path("x"), 143, 0.0) is None
