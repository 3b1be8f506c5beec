"""The command lines of `tune rerun` and `tune validate`, `--retry`, and what a Python caller is told."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from recorded_studies import replace_records, write_study
from recorded_studies import tune as run_tune

import tinyllm_ray.tune.again.command as command
import tinyllm_ray.tune.tuner as tuner
from tinyllm_ray import tune
from tinyllm_ray.allocation import END_VARIABLE, MARGIN_SECONDS
from tinyllm_ray.clock import Deadline
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.errors import ConfigError, NoResultError, TinyllmRayError
from tinyllm_ray.records import Fate, read_records
from tinyllm_ray.tune.__main__ import build_parser, main
from tinyllm_ray.tune.request import StudyRequest, check_request
from tinyllm_ray.tune.supervisor import Outcome


def outcome(status: int, message: str | None = None) -> Outcome:
    return Outcome(status, False, message, 1.0, (), None, False)


class Supervised:
    """Stands in for the supervisor: notes what was asked, and does what the study's process would."""

    def __init__(self, answer: Outcome, work: Any = lambda request: None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self._answer, self._work = answer, work

    def __call__(self, program: Any, *, request: dict[str, Any], deadline: Deadline) -> Outcome:
        self.requests.append(request)
        self.seconds.append(deadline.remaining())
        self._work(request)
        return self._answer


def supervised(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Supervised:
    found = Supervised(*arguments)
    monkeypatch.setattr(command, "supervise", found)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


def test_rerun_asks_for_one_candidate_within_its_own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    found = supervised(monkeypatch, outcome(0))
    assert main(["rerun", "studies/50m", "c03"]) == 0
    (request,) = found.requests
    assert (request["task"], request["out"], request["candidate"]) == ("rerun", "studies/50m", "c03")
    assert (request["budget"], request["total_seconds"], request["address"]) == ("10m", 600.0, None)
    assert found.seconds[0] <= 600.0 - request["age_seconds"]


def test_validate_asks_for_a_file_or_the_folder_it_lies_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = supervised(monkeypatch, outcome(3))
    assert main(["validate", str(tmp_path), "--budget", "2m", "--address", "host:1"]) == 3
    assert main(["validate", str(tmp_path / "mine.yaml"), "--out", "there"]) == 3
    folder, file = found.requests
    assert folder["selected"] == str(tmp_path / "selected.yaml")
    assert Path(folder["out"]).parent == tmp_path / "validations"
    assert (folder["task"], folder["total_seconds"], folder["address"]) == ("validate", 120.0, "host:1")
    assert (file["selected"], file["out"], file["budget"]) == (str(tmp_path / "mine.yaml"), "there", "90s")


@pytest.mark.parametrize("arguments", [["rerun"], ["rerun", "a"], ["rerun", "a", "b", "c"], ["validate"], ["revise"]])
def test_a_wrong_command_line_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["rerun", "study", "c01", "--budget", "5"], ["validate", "x", "--budget", "0s"]])
def test_a_wrong_budget_is_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --budget: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "kind"), [(2, ConfigError), (3, NoResultError), (130, KeyboardInterrupt), (1, TinyllmRayError)]
)
def test_a_python_caller_is_told_why_there_is_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, kind: type[BaseException]
) -> None:
    supervised(monkeypatch, outcome(status, "because"))
    with pytest.raises(kind, match="because"):
        tune.rerun(tmp_path, "c01")
    with pytest.raises(kind, match="because"):
        tune.validate(tmp_path / "selected.yaml")


def test_a_python_caller_of_a_study_without_a_result_is_told_where_to_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tuner, "supervise", Supervised(outcome(3)))
    study = tune.Tuner(preset="nano", budget="1m", out=tmp_path / "study")
    with pytest.raises(
        NoResultError, match=r"no candidate gave a figure .*: .*/study/summary\.json says what happened"
    ):
        study.fit()


def test_a_study_from_python_ends_before_its_allocation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = Supervised(outcome(3))
    monkeypatch.setattr(tuner, "supervise", found)
    monkeypatch.setenv(END_VARIABLE, str(int(time.time()) + 3600))
    with pytest.raises(NoResultError):
        tune.Tuner(preset="nano", budget="2h", out=tmp_path / "study").fit()
    assert found.seconds[0] <= 3600 - MARGIN_SECONDS


def test_a_configuration_that_cannot_be_looked_at_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert main(["validate", "others/selected.yaml"]) == 2
    why = "permission denied; choose another, or have it opened to you"
    assert capsys.readouterr().err == f"error: others/selected.yaml: {why}\n"


def test_a_python_caller_has_both_figures_and_their_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "study"
    known = write_study(out, lambda execution: 2000.0)

    def work(request: dict[str, Any]) -> None:
        again = known[0].model_copy(
            update={"candidate": f"{known[0].candidate}-r1", "purpose": "repeat", "targets_per_second": 1990.0}
        )
        replace_records(out, [*known, again])

    supervised(monkeypatch, outcome(0), work)
    found = tune.rerun(out, "c01")
    assert isinstance(found, command.Rerun)
    assert (found.before, found.after.purpose) == (known[0], "repeat")
    assert found.difference is not None
    assert found.difference.ratio == pytest.approx(0.995)
    assert str(found.difference).startswith("0.5% slower: within the noise (")


# --retry


def retrying(words: str) -> StudyRequest:
    options = build_parser().parse_args(["--budget", "1m", "--resume", "--retry", words])
    request = {"budget": "1m", "budget_seconds": 60, "total_seconds": 60, "age_seconds": 0, "out": "x", "resume": True}
    return StudyRequest.model_validate(request | {"retry": [word for word in options.retry.split(",") if word]})


def test_retry_names_fates_of_failed_candidates() -> None:
    check_request(retrying("failed,lost,timed_out,invalid,out_of_memory"))
    for wrong in ("complete", "faild", "dominated"):
        with pytest.raises(
            ConfigError, match=f"--retry: '{wrong}' is not a fate to measure again; give some of failed"
        ):
            check_request(retrying(wrong))


def test_retry_is_for_a_study_that_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--retry: there is nothing to measure again in a study that begins"):
        tune.Tuner(budget="1m", out=tmp_path, preset="nano", retry=["failed"])
    tune.Tuner(budget="1m", out=tmp_path, preset="nano", resume=True, retry=["failed"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_failed_candidate_is_measured_again_for_real(built_root: Path, tmp_path: Path) -> None:
    """Both records stay, and the one that gave a figure counts."""
    (cache,) = (open_cache(path.parent) for path in built_root.rglob("manifest.json"))
    out = tmp_path / "study"

    def rate(execution: dict[str, Any]) -> float | Fate:
        fails = (execution["sdpa_backend"], execution["micro_batch_size"]) == ("math", 4)
        return Fate.FAILED if fails else 1000.0

    known = write_study(out, rate, cache.identity)
    (failed,) = (one for one in known if one.fate == Fate.FAILED)
    arguments = ("--config", "recipe.yaml", "--space", "space.yaml", "--objective", "throughput", "--out", out)
    budget = ("--budget", "8m", "--resume", "--retry", "failed")
    done = run_tune(built_root, tmp_path, *budget, *arguments)
    assert done.status == 0, done.output
    records = read_records(out / "trials.jsonl")
    assert records[: len(known)] == known
    again = [one for one in records[len(known) :] if one.candidate == failed.candidate]
    assert [one.fate for one in again] == [Fate.COMPLETE], done.output
