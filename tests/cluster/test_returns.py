"""A job that comes back: what its command becomes, and when it has to go back into the queue."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.allocation import END_VARIABLE, MARGIN_SECONDS
from tinyllm_ray.cluster.driver import Warned
from tinyllm_ray.cluster.returns import (
    continued,
    has_to_return,
    may_return,
    runs_before,
    settled_status,
    study_folder,
)

TUNE = ["tune", "--budget", "45m", "--out", "study"]
USR1, TERM = int(signal.SIGUSR1), int(signal.SIGTERM)


@pytest.fixture(autouse=True)
def in_the_jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def leave_study(ended: str | None, elapsed: float, *, exhausted: bool = False, selected: bool = True) -> None:
    Path("study").mkdir(exist_ok=True)
    Path("study/study.yaml").touch()
    if selected:
        Path("study/selected.yaml").touch()
    summary: dict[str, Any] = {"ended": ended, "elapsed_seconds": elapsed, "budget_seconds": 2700.0}
    Path("study/summary.json").write_text(json.dumps(summary | {"budget_exhausted": exhausted}))


def test_slurm_says_whether_and_how_often_a_job_has_come_back() -> None:
    assert may_return("JobId=7 JobName=x Requeue=1 Restarts=0 BatchFlag=1")
    assert not may_return("JobId=7 JobName=x Requeue=0 Restarts=0 BatchFlag=1")
    assert [runs_before({"SLURM_RESTART_COUNT": text}) for text in ("2", "", "x")] == [2, 0, 0]
    assert runs_before({}) == 0


def test_a_study_goes_on_in_its_folder_and_a_training_in_its_own() -> None:
    assert continued(["--", *TUNE], 7, before=0) == TUNE
    assert continued(TUNE, 7, before=1) == TUNE, "preempted before the study had begun"
    leave_study(None, 60.0)
    assert continued(TUNE, 7, before=0) == TUNE, "another job's study is not taken over by itself"
    assert continued(TUNE, 7, before=1) == [*TUNE, "--resume"]
    assert continued([*TUNE, "--resume"], 7, before=1) == [*TUNE, "--resume"]
    train = ["train", "--config", "20m", "--out", "run"]
    assert continued(train, 7, before=0) == train
    assert continued(train, 7, before=1) == [*train, "--resume"]
    for words in (["tune", "report", "study"], ["train", "evaluate", "run"], ["mine.py"], ["data", "prepare"]):
        assert continued(words, 7, before=1) == words


def test_a_study_without_a_folder_gets_one_that_every_run_of_the_job_finds() -> None:
    first = continued(["tune", "--budget", "45m"], 7, before=0)
    assert study_folder(first) == Path("studies/job-7")
    assert continued(["tune", "--budget", "45m"], 7, before=1) == first
    assert study_folder(["tune", "--out=a", "--out", "b"]) == Path("b")


@pytest.mark.parametrize(
    ("ended", "elapsed", "exhausted", "has_rest"),
    [
        ("SIGTERM", 600.0, False, True),
        ("the budget's end", 600.0, False, True),
        ("budget: the next candidate needs up to 80 s", 600.0, True, True),
        ("nodes lost: a trial takes 1 GPU", 600.0, False, True),
        (None, 600.0, False, True),
        ("space exhausted", 600.0, False, False),
        ("SIGTERM", 2690.0, False, False),
    ],
)
def test_only_a_study_that_was_cut_with_budget_left_goes_on(
    ended: str | None, elapsed: float, exhausted: bool, has_rest: bool
) -> None:
    leave_study(ended, elapsed, exhausted=exhausted)
    assert has_to_return(TUNE, 143, [USR1], left=900.0) is has_rest
    assert has_to_return(TUNE, 0, [], left=50.0) is has_rest, "its deadline was the allocation's"
    assert settled_status(Path("study")) == (None if has_rest else 0)
    for others in ([TERM], [USR1, TERM]):
        assert not has_to_return(TUNE, 143, others, left=50.0), "Slurm or somebody else is ending the job"
    assert not has_to_return(TUNE, 1, [USR1], left=50.0), "a fault would come again"


def leave_studies(ended: str | None, elapsed: float, *states: str, answered: bool = True) -> None:
    """Studies that share a budget, as `tune --presets` leaves them."""
    Path("study/20m").mkdir(parents=True, exist_ok=True)
    Path("study/presets.yaml").touch()
    selected = "mb32 compiled" if answered else None
    studies = [{"name": str(place), "state": state, "selected": selected} for place, state in enumerate(states)]
    summary = {"ended": ended, "elapsed_seconds": elapsed, "budget_seconds": 2700.0, "studies": studies}
    Path("study/summary.json").write_text(json.dumps(summary))


def test_studies_that_share_a_budget_go_on_in_their_folder() -> None:
    several = ["tune", "--presets", "20m,50m", *TUNE[1:]]
    assert continued(several, 7, before=1) == several
    leave_studies(None, 60.0, "running", "waiting")
    assert continued(several, 7, before=1) == [*several, "--resume"]


@pytest.mark.parametrize(
    ("ended", "elapsed", "states", "has_rest"),
    [
        ("SIGTERM", 600.0, ("done", "interrupted"), True),
        ("nodes lost: a trial takes 1 GPU", 600.0, ("interrupted", "waiting"), True),
        ("budget: 50m had more to measure", 600.0, ("done", "short"), True),
        ("budget: 50m had more to measure", 2690.0, ("done", "short"), False),
        ("every recipe was studied", 600.0, ("done", "done"), False),
        ("left out: 50m", 600.0, ("done", "left out"), False),
    ],
)
def test_only_studies_with_something_left_to_measure_go_on(
    ended: str, elapsed: float, states: tuple[str, ...], has_rest: bool
) -> None:
    leave_studies(ended, elapsed, *states)
    assert has_to_return(TUNE, 143, [USR1], left=900.0) is has_rest
    assert has_to_return(TUNE, 0, [], left=50.0) is has_rest
    assert settled_status(Path("study")) == (None if has_rest else 0)
    leave_studies("every recipe was studied", elapsed, *states, answered=False)
    assert settled_status(Path("study")) == (None if "short" in states and elapsed < 2640 else 3)


def test_a_study_that_its_own_budget_ended_gains_nothing_by_another_allocation() -> None:
    leave_study("budget: the next candidate needs up to 165 s and 97 s are left", 2603.0, exhausted=True)
    for left in (3600.0, None):
        assert not has_to_return(TUNE, 0, [], left)
    assert has_to_return(TUNE, 0, [], left=40.0)


def test_a_study_that_left_nothing_does_not_go_round_for_ever() -> None:
    assert not has_to_return(TUNE, 143, [USR1], left=50.0)
    assert settled_status(Path("study")) is None
    leave_study("SIGTERM", 2700.0, selected=False)
    assert settled_status(Path("study")) == 3


def test_another_command_goes_back_when_the_warning_ended_it() -> None:
    train = ["train", "--config", "20m", "--out", "run"]
    assert has_to_return(train, 143, [USR1], left=50.0)
    assert not has_to_return(train, 0, [USR1], left=50.0)
    assert not has_to_return(train, 143, [], left=50.0)
    assert not has_to_return(train, 143, [TERM], left=50.0)


def test_the_warning_of_the_limit_waits_until_a_study_has_ended_by_itself() -> None:
    now = [1_000_000.0]
    end = now[0] + 3600
    warned = Warned({END_VARIABLE: str(int(end))}, now=lambda: now[0])
    assert not warned.is_early([USR1]), "somebody wants it to end an hour early"
    now[0] = end - 118
    assert warned.is_early([USR1])
    assert warned.is_early([USR1, USR1])
    assert not warned.is_early([USR1, TERM])
    now[0] = end - MARGIN_SECONDS
    assert warned.is_early([USR1]), "the study's own deadline"
    now[0] = end - 46
    assert not warned.is_early([USR1])


def test_where_nobody_knows_the_end_a_warning_is_passed_on_at_once() -> None:
    assert not Warned({}).is_early([USR1])
