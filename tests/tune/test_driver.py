"""The study's driver and its report: requests, events and records in, files out; no Ray and no process."""

import gc
import json
import os
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import identity, load
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord, Window
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.paired import PairedVerifier
from tinyllm_ray.search.space import Space, load_space
from tinyllm_ray.search.study import Study
from tinyllm_ray.train.outcome import RunningCandidate, build_record
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.report import Report, closing_lines

CONFIG = load("nano")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def published() -> list[TrialRecord]:
    return []


@pytest.fixture
def driver(tmp_path: Path, clock: FakeClock, published: list[TrialRecord]) -> StudyDriver:
    (tmp_path / "candidates").mkdir()
    study = Study(fit_space(load_space("smoke"), CONFIG, "cpu", cores=2))
    deadline = Deadline.after(1000, clock)
    return StudyDriver(study, "study", CONFIG, None, tmp_path, deadline, publish=published.append)


def window(index: int, rate: float = 2048.0) -> dict[str, Any]:
    return Window(
        index=index,
        updates=5,
        targets=10240,
        seconds=10240 / rate,
        targets_per_second=rate,
        data_wait_seconds=0.0,
        loss=9.0,
        grad_norm=1.0,
        timestamp=0.0,
    ).model_dump(mode="json")


def ended(
    request: Any, fate: Fate = Fate.COMPLETE, rate: float = 2048.0, loss: float = 9.0, host: str | None = None
) -> dict[str, Any]:
    """The last event of a candidate; `loss` is that of update 10, `host` where it ran."""
    running = RunningCandidate(request, Deadline.after(1), 0.0, 0.0)
    running.hear({"event": "stage", "stage": "start"})
    running.hear({"event": "stage", "stage": "compile", "seconds": 1.0})
    running.hear({"event": "stage", "stage": "warmup", "seconds": 2.0})
    if fate == Fate.COMPLETE:
        for index in range(3):
            running.hear({"event": "window", "window": window(index, rate)})
        proof = {"trajectory": [{"update": 10, "loss": loss, "grad_norm": 1.0}]}
        result = {"targets_per_second": rate, "seconds_per_update": 2048 / rate, "proof": proof}
        if host:
            result["devices"] = [{"kind": "cpu", "name": "a processor", "host": host}]
        running.hear({"event": "result", **result})
    source = {"sha256": "0", "dirty": None}
    record = build_record(running, fate, None if fate == Fate.COMPLETE else "why", 9.0, {}, source, None)
    return {"event": "record", "record": record.model_dump(mode="json"), "place": f"place of {host}"}


def test_a_request_is_the_recipe_under_the_candidates_execution(driver: StudyDriver, tmp_path: Path) -> None:
    request = driver.ask()
    assert request is not None
    written = load(tmp_path / request["configuration"])
    assert written.model_dump(mode="json") == request["config"]
    assert written.recipe_identity == CONFIG.recipe_identity
    assert request["cache"] is None
    assert request["device_kind"] == "cpu"
    assert request["protocol"] == driver.study.protocol.model_dump(mode="json")


def test_no_candidate_may_run_past_the_budget_and_none_may_hang(driver: StudyDriver, clock: FakeClock) -> None:
    first = driver.ask()
    assert first is not None
    assert 120 <= first["limit_seconds"] < 1000
    driver.hear(first["candidate"], ended(first))
    clock.advance(950)
    second = driver.ask()
    assert second is not None
    assert second["limit_seconds"] == pytest.approx(50)


def test_a_record_is_published_before_the_study_goes_on(driver: StudyDriver, published: list[TrialRecord]) -> None:
    request = driver.ask()
    assert request is not None
    assert driver.ask() is None  # the baseline runs alone
    driver.hear(request["candidate"], {"event": "window", "window": window(0)})
    assert driver.row(request["candidate"]).detail == "window 2"
    last = ended(request)
    driver.hear(request["candidate"], last)
    driver.hear(request["candidate"], last)  # Tune gives the last result twice
    assert [record.candidate for record in published] == [request["candidate"]]
    row = driver.row(request["candidate"])
    assert (row.state, row.targets_per_second, row.versus_baseline) == ("complete", 2048.0, 1.0)
    assert driver.ask() is not None


def test_a_lost_candidate_keeps_the_windows_it_had(driver: StudyDriver, published: list[TrialRecord]) -> None:
    request = driver.ask()
    assert request is not None
    driver.hear(request["candidate"], {"event": "stage", "stage": "windows", "seconds": 1.0})
    driver.hear(request["candidate"], {"event": "window", "window": window(0)})
    driver.lose(request["candidate"])
    driver.lose(request["candidate"])
    (record,) = published
    assert record.fate == Fate.LOST
    assert record.reason == "its Ray process or node went away during windows"
    assert len(record.windows) == 1
    assert record.targets_per_second is None
    assert driver.row(request["candidate"]).state == "lost"


def test_a_candidate_that_learned_otherwise_never_wins(
    driver: StudyDriver, published: list[TrialRecord], tmp_path: Path
) -> None:
    """However fast it is: it is invalid before it is published."""
    while (request := driver.ask()) is not None:
        liar = request["config"]["execution"]["update"] == "compiled"
        rate, loss = (9000.0, 8.9) if liar else (2000.0, 9.0)
        driver.hear(request["candidate"], ended(request, rate=rate, loss=loss))
    fates = {record.execution["update"]: (record.fate, record.reason) for record in published}
    assert fates["eager"] == (Fate.COMPLETE, None)
    assert fates["compiled"][0] is Fate.INVALID
    assert str(fates["compiled"][1]).startswith("update 10: loss 8.9 is outside, equal runs lie in 8.99")
    selection = driver.study.selection()
    assert selection is not None
    assert selection.record.execution["update"] == "eager"
    liars = [row for row in driver.rows() if row.state == "invalid"]
    assert liars
    assert all(row.detail.startswith("update 10: loss") for row in liars)


def test_a_resumed_study_judges_by_the_baseline_it_had(tmp_path: Path, driver: StudyDriver) -> None:
    first = driver.ask()
    assert first is not None
    baseline = TrialRecord.model_validate(ended(first)["record"])
    published: list[TrialRecord] = []
    space = fit_space(load_space("smoke"), CONFIG, "cpu", cores=2)
    study = Study(space, records=[baseline])
    deadline = Deadline.after(1000, FakeClock())
    resumed = StudyDriver(study, "study", CONFIG, None, tmp_path, deadline, published.append, earlier=[baseline])
    request = resumed.ask()
    assert request is not None
    resumed.hear(request["candidate"], ended(request, loss=8.9))
    assert [record.fate for record in published] == [Fate.INVALID]


def test_the_baseline_is_compared_with_the_reference(driver: StudyDriver) -> None:
    first = driver.ask()
    assert first is not None
    assert first["parity"] is True
    driver.hear(first["candidate"], ended(first))
    second = driver.ask()
    assert second is not None
    assert second["parity"] is False


def test_a_candidate_under_proof_says_so(driver: StudyDriver) -> None:
    request = driver.ask()
    assert request is not None
    driver.hear(request["candidate"], {"event": "stage", "stage": "windows", "seconds": 1.0})
    driver.hear(request["candidate"], {"event": "window", "window": window(0)})
    driver.hear(request["candidate"], {"event": "stage", "stage": "proof"})
    assert driver.row(request["candidate"]).detail == "proof"


def finish(driver: StudyDriver, rate: Callable[[dict[str, Any]], float]) -> None:
    while (request := driver.ask()) is not None:
        driver.hear(request["candidate"], ended(request, rate=rate(request["config"]["execution"])))


def report_of(driver: StudyDriver, out: Path) -> Report:
    return Report(out, "study", CONFIG, 1000.0, lambda: 12.5, {"space": "smoke"})


def test_the_report_stands_from_the_first_trial_on(driver: StudyDriver, tmp_path: Path) -> None:
    report = report_of(driver, tmp_path)
    request = driver.ask()
    report.write(driver)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["selected"] is None
    assert summary["ended"] is None
    assert [row["state"] for row in summary["candidates"]].count("running") == 1
    assert not (tmp_path / "selected.yaml").exists()
    assert request is not None
    driver.hear(request["candidate"], ended(request))
    report.write(driver)
    assert load(tmp_path / "selected.yaml").execution.model_dump(mode="json") == request["config"]["execution"]


def test_the_report_of_a_finished_study(driver: StudyDriver, tmp_path: Path) -> None:
    finish(driver, lambda execution: 3000.0 if execution["update"] == "compiled" else 2000.0)
    assert driver.end is not None
    assert driver.end.startswith("nothing left is expected to be faster")
    assert driver.budget_exhausted is False
    report_of(driver, tmp_path).write(driver)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["elapsed_seconds"] == 12.5
    assert summary["space"] == "smoke"
    assert summary["selected"]["versus_baseline"] == pytest.approx(1.5)
    assert summary["selected"]["execution"]["update"] == "compiled"
    assert summary["baseline"]["candidate"] == summary["eager"]["candidate"]
    assert {row["candidate"] for row in summary["candidates"]} >= {summary["selected"]["candidate"], *summary["ties"]}
    lines = closing_lines(driver, Path("there"))
    assert any("3,000 targets/s, 1.50x the baseline" in line for line in lines)
    assert lines[-1] == "next: python -m tinyllm_ray.train --config there/selected.yaml --out there/run"


def verifying(tmp_path: Path, records: list[TrialRecord] | None = None) -> StudyDriver:
    """Of a study that verifies its choice; its trials take no time."""
    (tmp_path / "candidates").mkdir(exist_ok=True)
    space = fit_space(load_space("smoke"), CONFIG, "cpu", cores=2)
    study = Study(space, records=records or (), verifier=PairedVerifier(space.protocol, most_seconds=400))
    return StudyDriver(study, "study", CONFIG, None, tmp_path, Deadline.after(1000, FakeClock()))


def kind_rate(execution: dict[str, Any]) -> float:
    return 3000.0 if execution["update"] == "compiled" else 2000.0


def test_the_choice_is_verified_in_pairs_of_fresh_processes(tmp_path: Path) -> None:
    driver = verifying(tmp_path)
    again = []
    while (request := driver.ask()) is not None:
        if request["purpose"] == "verification":
            again.append(request)
            assert request["limit_seconds"] > request["protocol"]["least_seconds"]
        driver.hear(request["candidate"], ended(request, rate=kind_rate(request["config"]["execution"])))
    short = [request for request in again if request["protocol"]["least_seconds"] < 60]
    rounds = [request["round"] for request in short]
    assert rounds == sorted(rounds)
    assert len(set(rounds)) >= 3
    assert all(rounds.count(number) == rounds.count(0) > 1 for number in (1, 2)), "everyone once a round"
    assert len({request["candidate"] for request in again}) == len(again)
    loaded = [request["protocol"]["least_seconds"] for request in again if request not in short]
    assert loaded == [60, 60], "the winner and the baseline under a minute's load"
    report_of(driver, tmp_path).write(driver)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["selected"]["execution"]["update"] == "compiled"
    assert summary["speedup"]["verified"]
    assert summary["speedup"]["ratio"] == pytest.approx(1.5)
    assert summary["speedup"]["low"] < 1.5 < summary["speedup"]["high"]
    lines = closing_lines(driver, tmp_path)
    assert any("1.500x the baseline (1.4" in line and "pairs of processes)" in line for line in lines), lines


PARITY = {
    "updates": 20,
    "targets": 128,
    "loss": 9.0,
    "reference_loss": 9.0,
    "relative_loss_error": 0.0,
    "relative_gradient_error": 0.0,
    "worst_weight": "head.weight",
    "worst_weight_error": 0.0,
}


def verified_with(driver: StudyDriver, compared: Callable[[Any], bool]) -> dict[str, list[bool]]:
    """Whether the verification's processes of each execution were asked for parity, which they have by `compared`."""
    asked: dict[str, list[bool]] = {}
    while (request := driver.ask()) is not None:
        execution = request["config"]["execution"]
        if request["purpose"] == "verification":
            asked.setdefault(identity(execution), []).append(request["parity"])
        event = ended(request, rate=kind_rate(execution))
        event["record"]["proof"]["parity"] = PARITY if compared(request) else None
        driver.hear(request["candidate"], event)
    return asked


def test_finalists_are_compared_with_the_reference_once_and_the_baseline_always(tmp_path: Path) -> None:
    driver = verifying(tmp_path)
    asked = verified_with(driver, lambda request: request["parity"])
    assert all(asked.pop(identity(driver.study.space.baseline))), "it is what the others are held to"
    assert asked
    assert all(one == [True] + [False] * (len(one) - 1) and len(one) >= 3 for one in asked.values()), asked


def test_a_finalist_that_was_not_compared_yet_is_asked_for_it_again(tmp_path: Path) -> None:
    asked = verified_with(verifying(tmp_path), lambda request: False)
    assert all(all(one) for one in asked.values()), asked


def test_a_verification_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    """Its records count as such: neither the search nor what makes pairs is measured again."""
    first = verifying(tmp_path)
    records: list[TrialRecord] = []
    first.publish = records.append
    while [record.purpose for record in records].count("verification") < 3:
        request = first.ask()
        assert request is not None
        first.hear(request["candidate"], ended(request, rate=kind_rate(request["config"]["execution"])))
    second = verifying(tmp_path, records)
    request = second.ask()
    assert request is not None
    assert (request["purpose"], request["round"]) == ("verification", 1), "what round 0 has of it counts"
    assert request["candidate"] not in {record.candidate for record in records}


def on_two_nodes(tmp_path: Path, published: list[TrialRecord]) -> StudyDriver:
    (tmp_path / "candidates").mkdir(exist_ok=True)
    space = fit_space(load_space("smoke"), CONFIG, "cpu", cores=2)
    study = Study(space, verifier=PairedVerifier(space.protocol, most_seconds=400), devices=2)
    return StudyDriver(study, "study", CONFIG, None, tmp_path, Deadline.after(1000, FakeClock()), published.append)


def test_two_nodes_begin_with_the_control_and_what_is_told_of_them_is_levelled(
    tmp_path: Path, published: list[TrialRecord]
) -> None:
    driver = on_two_nodes(tmp_path, published)
    baseline, control = driver.ask(), driver.ask()
    assert baseline is not None
    assert control is not None
    assert (baseline["purpose"], control["purpose"]) == ("search", "control")
    assert baseline["config"] == control["config"]
    assert driver.ask() is None
    driver.hear(baseline["candidate"], ended(baseline, rate=2000.0, host="a"))
    driver.hear(control["candidate"], ended(control, rate=1900.0, host="b"))
    assert [record.purpose for record in published] == ["search", "control"]
    assert driver.row(control["candidate"]).versus_baseline == pytest.approx(1.0)
    one = driver.ask()
    assert one is not None
    driver.hear(one["candidate"], ended(one, rate=1900.0, host="b"))
    assert driver.row(one["candidate"]).versus_baseline == pytest.approx(1.0)
    report_of(driver, tmp_path).write(driver)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(one["device"], one["slow"]) for one in summary["devices"]] == [("cpu of a", False), ("cpu of b", True)]
    assert any(line.startswith("slow device: cpu of b has 95.0% of") for line in closing_lines(driver, tmp_path))


def test_what_dominates_is_what_the_slowest_device_can(tmp_path: Path, published: list[TrialRecord]) -> None:
    driver = on_two_nodes(tmp_path, published)
    driver.study.protocol = Protocol(version="adaptive")
    both = [driver.ask(), driver.ask()]
    for request, host, rate in zip(both, "ab", (2000.0, 1900.0), strict=True):
        assert request is not None
        driver.hear(request["candidate"], ended(request, rate=rate, host=host))
    candidate = driver.ask()
    assert candidate is not None
    assert candidate["purpose"] == "search"
    assert 1800 < candidate["bar"]["targets_per_second"] < 1900


def test_a_verification_on_two_nodes_asks_for_the_place_of_the_first(
    tmp_path: Path, published: list[TrialRecord]
) -> None:
    driver = on_two_nodes(tmp_path, published)
    waiting: list[Any] = []
    places: list[tuple[str, str]] = []
    while True:
        request = driver.ask()
        if request is None and not waiting:
            break
        if request is not None:
            waiting.append(request)
        if request is None or len(waiting) == 2:
            first = waiting.pop(0)
            verifying = first["purpose"] == "verification"
            # The fastest ran on b, and so does what is measured again.
            host = "b" if verifying or first["config"]["execution"]["update"] == "compiled" else "a"
            if verifying:
                places.append((first["purpose"], first["place"]))
            else:
                assert first["place"] is None
            driver.hear(first["candidate"], ended(first, rate=kind_rate(first["config"]["execution"]), host=host))
    assert len(places) >= 6
    assert {place for _, place in places} == {"place of b"}
    verified = driver.study.verified()
    assert verified is not None
    assert verified.speedup is not None


def test_a_search_alone_is_not_called_verified(driver: StudyDriver, tmp_path: Path) -> None:
    finish(driver, kind_rate)
    report_of(driver, tmp_path).write(driver)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["speedup"], summary["verification"]) == ({"ratio": 1.5, "verified": False}, None)
    assert any("1.50x the baseline in the search, not verified" in line for line in closing_lines(driver, tmp_path))


def test_a_baseline_that_stays_is_not_compared_with_itself(driver: StudyDriver, tmp_path: Path) -> None:
    finish(driver, lambda execution: 3000.0 if execution == driver.study.space.baseline else 2000.0)
    assert any(line.endswith("targets/s, the baseline itself") for line in closing_lines(driver, tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_memory_and_open_files_do_not_grow_with_what_candidates_say(tmp_path: Path) -> None:
    """Fifty windows and 5 MB of words each: what stays of a candidate is its record, and no file is left open."""
    (tmp_path / "candidates").mkdir()
    factors = {"micro_batch_size": [1, 2, 4, 8], "cpu_threads": list(range(1, 9)), "sdpa_backend": ["flash", "math"]}
    space = fit_space(
        Space.model_validate({"name": "wide", "baseline": {}, "factors": factors}), CONFIG, "cpu", cores=8
    )
    driver = StudyDriver(Study(space), "study", CONFIG, None, tmp_path, Deadline.after(1e6, FakeClock()))
    report = report_of(driver, tmp_path)
    luck, kept = random.Random(1), []
    tracemalloc.start()
    while (request := driver.ask()) is not None:
        for index in range(50):
            driver.hear(
                request["candidate"], {"event": "window", "window": window(index), "words": "w" * (100_000 - index)}
            )
        driver.hear(request["candidate"], ended(request, rate=luck.uniform(1000.0, 3000.0)))
        report.write(driver)
        gc.collect()
        kept.append((tracemalloc.get_traced_memory()[0], len(os.listdir("/proc/self/fd"))))
    tracemalloc.stop()
    (bytes_then, files_then), *later, (bytes_last, files_last) = kept[2:]  # what is kept once is there by then
    assert len(later) > 3, "it was over too soon to tell"
    assert files_last <= files_then
    assert (bytes_last - bytes_then) / (len(later) + 1) < 300_000, "bytes a candidate"


def test_nothing_to_believe_is_said(driver: StudyDriver, tmp_path: Path) -> None:
    while (request := driver.ask()) is not None:
        driver.hear(request["candidate"], ended(request, Fate.FAILED))
    report_of(driver, tmp_path).write(driver)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["selected"] is None
    assert summary["baseline"]["fate"] == "failed"
    assert "no candidate gave a figure that can be believed" in closing_lines(driver, tmp_path)[-1]
    assert not (tmp_path / "selected.yaml").exists()
