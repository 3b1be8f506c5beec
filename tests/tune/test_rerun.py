"""`tune rerun`: what a study's folder tells, what is refused, what the folder and the closing lines say after it."""

import fcntl
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import RunModule
from recorded_studies import ended, finish, replace_records, space, tune, write_study

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import load
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT, ConfigError
from tinyllm_ray.records import Device, Fate, TrialRecord, read_records
from tinyllm_ray.search.paired import PairedVerifier
from tinyllm_ray.search.repeat import Repeat
from tinyllm_ray.tune.again import recorded
from tinyllm_ray.tune.again.recorded import (
    RecordedStudy,
    changes_since,
    device_changes,
    measured_on,
    open_study,
)
from tinyllm_ray.tune.again.rerun import RerunReport
from tinyllm_ray.tune.claim import claim
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.page.compare import compare
from tinyllm_ray.tune.page.study import page_data
from tinyllm_ray.tune.page.write import write_page


def fastest_with_math(execution: dict[str, Any]) -> float:
    return 3000.0 if execution["sdpa_backend"] == "math" else 2000.0


def failing_with_math(execution: dict[str, Any]) -> float | Fate:
    return Fate.FAILED if execution["sdpa_backend"] == "math" else 2000.0


class Rerun:
    """A rerun of one candidate of the study in `out`, driven by hand."""

    def __init__(self, out: Path, candidate: str) -> None:
        self.study = open_study(out)
        record = self.study.record_of(candidate)
        fitted = self.study.space("cpu", 2)
        verifier = PairedVerifier(fitted.protocol, 48.0, self.study.objective)
        self.repeat = Repeat(fitted, self.study.records, record.execution_identity, self.study.objective, verifier)
        config = self.study.config
        self.driver = StudyDriver(
            self.repeat, "study", config, None, out, Deadline.after(500), earlier=self.study.records
        )
        self.report = RerunReport(
            out=out,
            study_id=self.study.earlier.definition.study,
            config=config,
            budget_seconds=self.study.budget_seconds,
            elapsed=lambda: self.study.earlier.spent_seconds + 25.0,
            facts=self.study.summary,
            study=self.study,
            repeat=self.repeat,
        )

    def measure(self, outcome: float | Fate) -> TrialRecord:
        (record,) = finish(self.driver, lambda execution: outcome)
        self.report.write(self.driver)
        replace_records(self.report.out, [*self.study.records, record])
        return record

    @property
    def lines(self) -> list[str]:
        return self.report.closing_lines(self.driver)


def summary_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def test_the_folder_tells_recipe_space_and_objective(tmp_path: Path) -> None:
    records = write_study(tmp_path / "study", fastest_with_math)
    study = open_study(tmp_path / "study")
    asked = space(tmp_path / "study")
    told = study.space("cpu", 2)
    assert study.config.recipe_identity == records[0].recipe_identity
    assert (told.baseline, told.protocol, told.name) == (asked.baseline, asked.protocol, asked.name)
    assert study.objective.kind == "throughput"
    assert study.earlier.spent_seconds == 60.0


def test_a_study_that_was_killed_before_its_first_report_is_told_by_its_records(tmp_path: Path) -> None:
    records = write_study(tmp_path / "study", fastest_with_math)
    (tmp_path / "study" / "summary.json").unlink()
    study = open_study(tmp_path / "study")
    told = study.space("cpu", 2)
    assert told.baseline == records[0].execution
    assert told.factors["sdpa_backend"] == ("auto", "math")
    assert told.protocol == records[0].protocol
    assert (study.budget_seconds, study.objective.kind, study.objective.runs) == (120.0, "training", 100)


def test_a_repeat_leaves_the_verdict_and_shows_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "study"
    records = write_study(out, fastest_with_math)
    before = summary_of(out)
    rerun = Rerun(out, before["selected"]["candidate"])
    record = rerun.measure(2988.0)
    after = summary_of(out)
    assert record.candidate == f"{before['selected']['candidate']}-r1"
    assert (after["selected"], after["ended"]) == (before["selected"], before["ended"])
    assert len(after["candidates"]) == len(before["candidates"]) + 1
    assert (after["elapsed_seconds"], after["budget_seconds"]) == (85.0, 145.0)
    assert rerun.report.exit_status(rerun.driver) == EXIT_DONE
    assert rerun.lines[0] == f"before: {before['selected']['candidate']}: complete, 3,000 targets/s"
    assert rerun.lines[1] == f"after:  {record.candidate}: complete, 2,988 targets/s"
    assert rerun.lines[2].startswith("0.4% slower: within the noise (")
    assert rerun.lines[3] == f"the study selects {before['selected']['candidate']}, as before"
    assert read_records(out / "trials.jsonl") == [*records, record]


def test_a_difference_beyond_the_noise_says_what_to_do(tmp_path: Path) -> None:
    write_study(tmp_path / "study", fastest_with_math)
    rerun = Rerun(tmp_path / "study", "c01")
    rerun.measure(1500.0)
    assert rerun.lines[2].startswith("25.0% slower: more than the noise (")
    assert "tune validate" in rerun.lines[3]


def test_a_candidate_that_had_failed_may_win(tmp_path: Path) -> None:
    out = tmp_path / "study"
    write_study(out, failing_with_math)
    before = summary_of(out)
    failed = next(row["candidate"] for row in before["candidates"] if row["state"] == "failed")
    rerun = Rerun(out, failed)
    record = rerun.measure(3000.0)
    after = summary_of(out)
    assert (record.candidate, record.purpose) == (failed, "search")
    assert after["selected"]["candidate"] == failed != before["selected"]["candidate"]
    assert load(out / "selected.yaml").execution.model_dump(mode="json") == record.execution
    assert rerun.lines[0] == f"before: {failed}: failed, why"
    assert f"the study selects {failed}" in rerun.lines
    assert [row["state"] for row in after["candidates"] if row["candidate"] == failed] == ["complete"]


def test_one_that_fails_again_is_no_result(tmp_path: Path) -> None:
    write_study(tmp_path / "study", failing_with_math)
    rerun = Rerun(tmp_path / "study", "c02")
    rerun.measure(Fate.FAILED)
    assert rerun.report.exit_status(rerun.driver) == EXIT_NO_RESULT


def test_ended_by_a_signal_the_summary_is_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "study"
    write_study(out, fastest_with_math, verify=True)
    before = summary_of(out)
    rerun = Rerun(out, "c01")
    assert rerun.driver.ask() is not None
    rerun.report.write(rerun.driver)
    assert summary_of(out)["ended"] is None, "it goes on"
    rerun.driver.stop("SIGINT", interrupted=True)
    rerun.report.write(rerun.driver)
    after = summary_of(out)
    assert (after["ended"], after["selected"]) == (before["ended"], before["selected"])
    assert after["speedup"]["ratio"] == pytest.approx(before["speedup"]["ratio"])
    assert after["speedup"]["verified"]
    assert rerun.report.exit_status(rerun.driver) == EXIT_NO_RESULT
    assert rerun.lines[-1] == "not measured again: SIGINT"


def test_page_export_and_comparison_take_a_repeat_for_one(tmp_path: Path) -> None:
    out = tmp_path / "study"
    known = write_study(out, fastest_with_math)
    record = Rerun(out, "c01").measure(9000.0)
    page = page_data(read_records(out / "trials.jsonl"), summary_of(out))
    assert page.selected is not None
    assert page.selected.targets_per_second == 3000.0
    (row,) = (one for one in page.candidates if one.name == record.candidate)
    assert (row.label, row.targets_per_second) == ("mb8 eager auto t1 again", 9000.0)
    assert all(point.candidate != record.candidate for point, _ in page.memory)
    assert [one.first for one in compare([*known, record], known)] == [one.first for one in compare(known, known)]
    assert write_page(out).stat().st_size > 10_000


# What is refused


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no study here \(study.yaml is missing\)"):
        open_study(tmp_path)


def test_a_study_that_has_measured_nothing_is_refused(tmp_path: Path) -> None:
    write_study(tmp_path / "study", fastest_with_math)
    (tmp_path / "study" / "trials.jsonl").unlink()
    with pytest.raises(ConfigError, match="has measured nothing yet"):
        open_study(tmp_path / "study")


def test_a_study_that_is_being_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path / "study", fastest_with_math)
    monkeypatch.setattr(recorded, "claim", functools.partial(claim, patience_seconds=0.0))
    with (tmp_path / "study" / "study.yaml").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="a session of this study is running"):
            open_study(tmp_path / "study")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("c01-mb8-eager-auot-t1", "did you mean c01-mb8-eager-auto-t1"),
        ("c99", "it measured c01-mb8-eager-auto-t1, c02"),
    ],
)
def test_an_unknown_candidate_is_refused_with_near_ones(tmp_path: Path, name: str, said: str) -> None:
    write_study(tmp_path / "study", fastest_with_math)
    with pytest.raises(ConfigError, match=f"has no candidate '{name}'; {said}"):
        open_study(tmp_path / "study").record_of(name)


def test_a_candidate_that_was_not_measured_is_refused_as_such(tmp_path: Path) -> None:
    records = write_study(tmp_path / "study", fastest_with_math)
    replace_records(tmp_path / "study", records[:-1])
    with pytest.raises(
        ConfigError, match=f"{records[-1].candidate} was not measured yet; the study goes on with --res"
    ):
        open_study(tmp_path / "study").record_of(records[-1].candidate)


def test_a_candidate_is_named_in_short_or_by_its_repeats(tmp_path: Path) -> None:
    write_study(tmp_path / "study", fastest_with_math, verify=True)
    study = open_study(tmp_path / "study")
    first = study.records[0]
    again = next(one for one in study.records if one.purpose == "verification")
    assert study.record_of("c01") == study.record_of(first.candidate) == first
    assert study.record_of(again.candidate).execution_identity == again.execution_identity
    assert study.record_of(again.candidate).purpose == "search"


def reference(tmp_path: Path, **changes: Any) -> TrialRecord:
    records = write_study(tmp_path / "study", fastest_with_math, "tokens")
    return records[-1].model_copy(update=changes)


def test_nothing_has_changed_where_it_was_measured(tmp_path: Path) -> None:
    record = reference(tmp_path)
    assert changes_since(record, "tokens") == []
    assert device_changes(measured_on([record]), "cpu", here=True) == []


def test_another_source_cache_or_version_is_named_with_both_values(tmp_path: Path) -> None:
    record = reference(tmp_path, source_identity="0" * 64)
    versions = {**record.environment["versions"], "torch": "1.0"}
    record = record.model_copy(update={"environment": {**record.environment, "versions": versions}})
    found = changes_since(record, "others")
    assert [line.partition(" is ")[0] for line in found] == ["source of tinyllm_ray", "token cache", "torch"]
    assert found[0].endswith("was 000000000000")
    assert found[1] == "token cache is others, was tokens"
    assert found[2].endswith(", was 1.0")


def test_a_record_that_tells_no_environment_is_held_to_source_and_cache_alone(tmp_path: Path) -> None:
    assert changes_since(reference(tmp_path, environment={}), "tokens") == []


def test_another_kind_of_device_is_named(tmp_path: Path) -> None:
    device = Device(kind="cuda", name="NVIDIA H200", host="there")
    record = reference(tmp_path, devices=[device])
    assert measured_on([record, record.model_copy(update={"devices": []})]) == device
    assert device_changes(device, "cpu", here=True) == ["device is cpu, was cuda (NVIDIA H200)"]
    other = Device(kind="cpu", name="Z80", host="there")
    (line,) = device_changes(other, "cpu", here=True)
    assert line.endswith(", was Z80")
    assert device_changes(other, "cpu", here=False) == [], "a cluster's processors tell when they are measured"
    assert device_changes(None, "cuda", False, ("A100", "H100")) == []


def test_a_clusters_other_model_is_named(tmp_path: Path) -> None:
    device = Device(kind="cuda", name="NVIDIA H200", host="there")
    assert device_changes(device, "cuda", False, ("H200",)) == []
    assert device_changes(device, "cuda", False) == [], "Ray does not know all models"
    assert device_changes(device, "cuda", False, ("A100", "H100")) == ["device is A100 and H100, was NVIDIA H200"]


# The command


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_candidate_is_measured_again_for_real(built_root: Path, tmp_path: Path) -> None:
    """A process of the real trainer over real Ray; the record reaches the folder, and the page with it."""
    (cache,) = (open_cache(path.parent) for path in built_root.rglob("manifest.json"))
    out = tmp_path / "study"
    known = write_study(out, fastest_with_math, cache.identity)
    done = tune(built_root, tmp_path, "rerun", out, "c01", "--budget", "20m")
    assert done.status == 0, done.output
    *before, record = read_records(out / "trials.jsonl")
    assert before == known
    assert (record.candidate, record.purpose, record.fate) == (f"{known[0].candidate}-r1", "repeat", Fate.COMPLETE)
    assert (record.study, record.cache_identity) == (known[0].study, cache.identity)
    assert record.protocol == known[0].protocol
    assert record.proof is not None
    assert record.proof.parity is not None
    assert f"before: {known[0].candidate}: complete, 2,000 targets/s" in done.output
    assert f"after:  {record.candidate}: complete, {record.targets_per_second:,.0f} targets/s" in done.output
    summary = summary_of(out)
    assert record.candidate in [row["candidate"] for row in summary["candidates"]]
    assert 60.0 < summary["elapsed_seconds"] < 60.0 + 1200.0
    assert "mb8 eager auto t1 again" in (out / "report.html").read_text()


@pytest.mark.usefixtures("neither_torch_nor_ray")
@pytest.mark.slow
def test_a_mistake_is_one_line_and_status_2(run_module: RunModule, tmp_path: Path) -> None:
    write_study(tmp_path / "study", fastest_with_math, "other tokens")
    before = {path: path.read_bytes() for path in (tmp_path / "study").rglob("*") if path.is_file()}
    for arguments, said in {
        ("nowhere", "c01"): "nowhere: there is no study here",
        ("study", "c77"): "the study has no candidate 'c77'; it measured c01",
        ("study", "c01"): "token cache is ",
        ("study", "c01", "--budget", "5"): "--budget: '5' is not a duration",
    }.items():
        done = run_module("tinyllm_ray.tune", "rerun", *arguments, cwd=tmp_path)
        assert done.status == 2, done.output
        assert done.output.startswith("error: "), done.output
        assert len(done.output.strip().splitlines()) == 1, done.output
        assert said in done.output
    assert {path: path.read_bytes() for path in (tmp_path / "study").rglob("*") if path.is_file()} == before


def test_it_is_recorded_as_the_study_has_it(tmp_path: Path) -> None:
    write_study(tmp_path / "study", fastest_with_math)
    rerun = Rerun(tmp_path / "study", "c01")
    request = rerun.driver.ask()
    assert request is not None
    assert (request["purpose"], request["parity"]) == ("repeat", True)
    assert isinstance(rerun.study, RecordedStudy)
    assert request["protocol"] == rerun.study.records[0].protocol.model_dump(mode="json")  # type: ignore[union-attr]
    assert ended(request, 1.0)["event"] == "record"
