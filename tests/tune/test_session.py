"""How a study's session ends: the verdict reaches the supervisor before Ray is shut down."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock
from full_disk import full_disk
from rich.console import Console

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import load
from tinyllm_ray.measure.environment import devices, installed_versions, usable_cores
from tinyllm_ray.records import Fate
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.space import load_space
from tinyllm_ray.search.study import Study
from tinyllm_ray.train.launcher import COMPILED
from tinyllm_ray.train.outcome import RunningCandidate, build_record
from tinyllm_ray.tune.channel import Channel, Lines
from tinyllm_ray.tune.decided import place_here, record_decision
from tinyllm_ray.tune.decisions import Shape, read_decisions
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.report import Report
from tinyllm_ray.tune.session import Session

CONFIG = load("nano")
BUDGET_SECONDS = 100.0


class Running:
    """A study of nano on two cores whose candidates are told by hand."""

    def __init__(self, out: Path, lines: Lines, channel: Channel, budget_seconds: float) -> None:
        (out / "candidates").mkdir()
        self._lines = lines
        self._told: list[dict[str, Any]] = []
        self.out = out
        self.clock = FakeClock()
        self.said = io.StringIO()
        self.driver = StudyDriver(
            Study(fit_space(load_space("smoke"), CONFIG, "cpu", cores=2)),
            "study",
            CONFIG,
            None,
            out,
            Deadline.after(budget_seconds, self.clock),
        )
        self.report = Report(out, "study", CONFIG, budget_seconds, lambda: 50.0)
        self.decided: list[bool] = []
        self.session = Session(
            self.driver,
            self.report,
            channel,
            Console(file=self.said, width=200),
            lambda: self.decided.append(self.told()),
        )

    def measure(self, request: Any, took_seconds: float, fate: Fate = Fate.COMPLETE, reason: str | None = None) -> None:
        """The candidate ends after so many seconds."""
        self.clock.advance(took_seconds)
        running = RunningCandidate(request, Deadline.after(1), 0.0, 0.0)
        proof = {"trajectory": [{"update": 10, "loss": 9.0, "grad_norm": 1.0}]}
        running.hear({"event": "stage", "stage": "start", "seconds": 1.0})
        if fate is Fate.COMPLETE:
            where = [device.model_dump(mode="json") for device in devices()]
            result = {"targets_per_second": 2e3, "seconds_per_update": 1.0, "proof": proof, "devices": where}
            running.hear({"event": "result", **result})
        source = {"sha256": "0", "dirty": None}
        environment = {"versions": installed_versions(), "cuda": None, "cpu": {"usable_cores": usable_cores()}}
        record = build_record(running, fate, reason, took_seconds, environment, source, None)
        self.driver.hear(request["candidate"], {"event": "record", "record": record.model_dump(mode="json")})
        self._listen()  # the pipe holds 64 kB, some twenty records

    def told(self) -> bool:
        """Whether the last report stands."""
        path = self.out / "summary.json"
        return path.exists() and json.loads(path.read_text())["ended"] is not None

    def verdicts(self) -> list[int]:
        """What the supervisor has been told is the end since it was last asked for."""
        self._listen()
        told, self._told = self._told, []
        return [message["exit_status"] for message in told if message["type"] == "done"]

    def _listen(self) -> None:
        self._told += self._lines.read(0) or []


@pytest.fixture
def lines_and_channel() -> Iterator[tuple[Lines, Channel]]:
    reading, writing = os.pipe()
    lines = Lines(reading)
    yield lines, Channel({}, writing)
    lines.close()
    os.close(writing)


@pytest.fixture
def running(tmp_path: Path, lines_and_channel: tuple[Lines, Channel]) -> Running:
    return Running(tmp_path, *lines_and_channel, BUDGET_SECONDS)


def test_the_verdict_is_told_once_the_last_report_stands_and_not_with_the_processs_end(running: Running) -> None:
    """What comes after it, a Ray shutdown for one, may hang."""
    request = running.driver.ask()
    running.measure(request, took_seconds=20)
    assert running.verdicts() == []
    assert running.session.close("space exhausted") == 0
    assert running.verdicts() == [0]
    assert (running.out / "selected.yaml").exists()
    assert running.session.close("SIGTERM", interrupted=True) == 0
    assert running.verdicts() == [], "it ends once"
    assert running.decided == [True], "and is kept for others once, after its last report"


def test_a_report_that_is_older_than_what_is_said_of_the_study_is_named_last(running: Running) -> None:
    running.measure(running.driver.ask(), took_seconds=20)
    with full_disk():
        assert running.session.close("space exhausted") == 0
    failed, *_, last = (line for line in running.said.getvalue().splitlines() if line.startswith(str(running.out)))
    assert failed == f"{running.out}: the report cannot be written: File too large"
    assert last == running.said.getvalue().splitlines()[-1]
    assert last == f"{running.out}: what is there is older than this; make room and run it again, a study with --resume"


def test_a_report_that_stands_is_not_named_as_older(running: Running) -> None:
    with full_disk():
        running.measure(running.driver.ask(), took_seconds=20)
    assert running.session.close("space exhausted") == 0
    assert "the report cannot be written" in running.said.getvalue()
    assert "older" not in running.said.getvalue()


def test_a_budget_for_nothing_but_the_baseline_has_the_baseline_for_its_answer(running: Running) -> None:
    request = running.driver.ask()
    assert request is not None
    running.measure(request, took_seconds=BUDGET_SECONDS - 5)
    assert running.driver.ask() is None
    assert running.driver.finished
    assert running.session.close(running.driver.end) == 0
    assert load(running.out / "selected.yaml").execution.model_dump(mode="json") == request["config"]["execution"]
    said = running.said.getvalue()
    assert "ended: budget: the next candidate needs up to" in said
    assert "and 5 s are left" in said


def test_a_budget_too_small_for_the_baseline_is_said(tmp_path: Path, lines_and_channel: tuple[Lines, Channel]) -> None:
    running = Running(tmp_path, *lines_and_channel, budget_seconds=3)
    assert running.driver.ask() is None
    assert running.session.close(running.driver.end) == 3
    assert running.verdicts() == [3]
    said = running.said.getvalue()
    assert "ended: budget: the baseline needs about" in said
    assert "and 3 s are left" in said
    assert not (tmp_path / "selected.yaml").exists()


def test_a_candidate_that_the_budget_cut_is_listed_as_that(running: Running) -> None:
    baseline = running.driver.ask()
    running.measure(baseline, took_seconds=20)
    cut = running.driver.ask()
    assert cut is not None
    assert running.session.close("the budget's end", interrupted=True) == 0
    assert running.driver.row(cut["candidate"]).state == "interrupted"
    assert "ended: the budget's end" in running.said.getvalue()


def test_where_nothing_fits_every_size_is_named_and_none_is_selected(running: Running) -> None:
    tried = []
    while (request := running.driver.ask()) is not None:
        tried.append(request["config"]["execution"])
        running.measure(request, 1, Fate.OUT_OF_MEMORY, "OutOfMemoryError: 3 GiB")
    assert running.session.close(running.driver.end) == 3
    assert running.verdicts() == [3]
    telling = ("update", "sdpa_backend", "micro_batch_size")
    kinds = [tuple(execution[key] for key in telling) for execution in tried]
    assert len(set(kinds)) == len(kinds), "a size that did not fit is not tried again, with other threads for one"
    details = {row.detail for row in running.driver.rows() if row.state == "out_of_memory"}
    assert details == {"OutOfMemoryError: 3 GiB"}
    assert "no candidate gave a figure that can be believed" in running.said.getvalue()


def test_one_bad_candidate_costs_nothing_but_itself(running: Running) -> None:
    baseline = running.driver.ask()
    running.measure(baseline, 1)
    bad = running.driver.ask()
    assert bad is not None
    running.measure(bad, 1, Fate.FAILED, "ValueError: why")
    while (request := running.driver.ask()) is not None:
        assert request["candidate"] != bad["candidate"]
        running.measure(request, 1)
    assert running.session.close(running.driver.end) == 0
    row = running.driver.row(bad["candidate"])
    assert (row.state, row.detail) == ("failed", "ValueError: why")
    states = [row.state for row in running.driver.rows()]
    assert states.count("failed") == 1
    assert states.count("complete") >= 2


def test_what_a_study_comes_to_is_added_to_the_decision_files_and_one_that_fails_costs_itself(running: Running) -> None:
    request = running.driver.ask()
    running.measure(request, 20)
    said: list[str] = []
    good, bad = running.out / "all" / "decisions.yaml", running.out / "summary.json" / "decisions.yaml"
    running.session.close("space exhausted")
    record_decision(running.driver.study, CONFIG, running.out, [bad, good], said.append)
    assert said[0].startswith(f"the decision is not added: {bad}: cannot be written")
    assert said[1] == f"decision added to {good}"
    (decision,) = read_decisions(good)
    assert decision.shape == Shape.of(CONFIG)
    assert decision.place == place_here().model_copy(update={"versions": decision.place.versions})
    assert decision.place.versions["torch"] == installed_versions()["torch"]
    assert decision.execution.model_dump(mode="json") == request["config"]["execution"]
    assert decision.promise == load(running.out / "selected.yaml").tuned, "one promise, wherever it is read"
    assert decision.promise.targets_per_second == pytest.approx(2e3)
    assert decision.speedup == 1.0


def test_what_was_compiled_is_found_from_wherever_the_decision_file_is(running: Running) -> None:
    request = running.driver.ask()
    running.measure(request, 20)
    assert request is not None
    compiled = running.out / "candidates" / f"{request['candidate']}.{COMPILED}"
    compiled.write_bytes(b"code")
    above, apart = running.out / "decisions.yaml", running.out / "apart" / "decisions.yaml"
    record_decision(running.driver.study, CONFIG, running.out, [above, apart], lambda line: None)
    named = [one.promise.compiled and one.promise.compiled.file for at in (above, apart) for one in read_decisions(at)]
    assert named == [f"candidates/{compiled.name}", str(compiled)], "relative where both can be moved as one"


def test_a_study_without_an_answer_decides_nothing(running: Running) -> None:
    running.measure(running.driver.ask(), 20, Fate.FAILED, "ValueError: why")
    record_decision(running.driver.study, CONFIG, running.out, [running.out / "decisions.yaml"], pytest.fail)
    assert not (running.out / "decisions.yaml").exists()


def test_the_summary_says_what_each_session_used(running: Running) -> None:
    """Killed ones too, whose last candidate left no record."""
    running.report.earlier_sessions = [{"session": "killed", "began": 0.0, "seconds": 42.0, "ended": False}]
    running.measure(running.driver.ask(), took_seconds=7)
    running.session.close("SIGINT")
    summary = json.loads((running.out / "summary.json").read_text())
    before, own = summary["sessions"]
    assert (before["session"], before["seconds"], before["ended"], before["trials"]) == ("killed", 42.0, False, 1)
    assert (own["seconds"], own["ended"], own["trials"]) == (8.0, True, 0)
    assert before["trial_seconds"] == 7.0, "its record's time says that it began then"
    assert summary["elapsed_seconds"] == before["seconds"] + own["seconds"]
