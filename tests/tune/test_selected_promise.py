"""What a study writes into selected.yaml of the execution that it selected: figures of its records, and one file."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import Config, load
from tinyllm_ray.promise import Promise
from tinyllm_ray.records import Device, Fate, KernelTime, Proof, Seconds, TrajectoryPoint, TrialRecord, Window
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.paired import PairedVerifier
from tinyllm_ray.search.space import load_space
from tinyllm_ray.search.study import Study
from tinyllm_ray.train.outcome import RunningCandidate, build_record, judge
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.promise import build_promise
from tinyllm_ray.tune.report import Report

CONFIG = load("nano")
CACHE = "/var/tmp/caches/0123456789abcdef"

Rate = Callable[[dict[str, Any]], float]


def study(out: Path, verified: bool) -> StudyDriver:
    (out / "candidates").mkdir()
    space = fit_space(load_space("smoke"), CONFIG, "cpu", cores=2)
    verifier = PairedVerifier(space.protocol, most_seconds=400) if verified else None
    return StudyDriver(Study(space, verifier=verifier), "s1", CONFIG, None, out, Deadline.after(2000, FakeClock()))


def window(index: int, rate: float) -> dict[str, Any]:
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


def record_of(request: dict[str, Any], rate: float, imports: float | None) -> TrialRecord:
    """Of a candidate that started in 1 s, compiled in 20 s, the second time in 3."""
    compiled = request["config"]["execution"]["update"] == "compiled"
    warm = request["purpose"] == "verification"
    first = (3.0 if warm else 20.0) if compiled else 0.5
    running = RunningCandidate(request, Deadline.after(1), 0.0, 0.0)
    if imports is not None:
        running.hear({"event": "ready", "import_seconds": imports})
    running.hear({"event": "stage", "stage": "start"})
    running.hear({"event": "stage", "stage": "compile", "seconds": 1.0})
    running.hear({"event": "stage", "stage": "warmup", "seconds": first})
    running.hear({"event": "stage", "stage": "windows", "seconds": first + 1})
    for index in range(3):
        running.hear({"event": "window", "window": window(index, rate)})
    proof = Proof(attention_seen=["flash"], trajectory=[TrajectoryPoint(update=10, loss=9.0, grad_norm=1.0)])
    kernels = [
        KernelTime(name=str(number), category=category, milliseconds=time, launches=1.0)
        for number, (category, time) in enumerate((("matmul", 3.0), ("matmul", 2.0), ("other", 1.0)))
    ]
    result = {
        "event": "result",
        "targets_per_second": rate,
        "seconds_per_update": 2048 / rate,
        "proof": proof.model_dump(),
        "kernels": [kernel.model_dump() for kernel in kernels],
        "devices": [Device(kind="cpu", name="a CPU", host="here").model_dump()],
    }
    running.hear(result)
    fate, reason = judge(running, {"event": "ended", "status": 0})
    environment = {"versions": {"torch": "2.11.0", "triton": None}, "driver": "570.1"}
    return build_record(running, fate, reason, 30.0, environment, {"sha256": "f" * 64, "dirty": None}, CACHE)


def measure(driver: StudyDriver, out: Path, rate: Rate, keeps: Callable[[str], bool] = lambda candidate: True) -> None:
    """Every candidate ends well, and keeps what it compiled where it compiles and `keeps` says so."""
    imports: float | None = 4.0
    while (request := driver.ask()) is not None:
        request = dict(request)
        found = record_of(request, rate(request), imports)
        imports = None
        if found.execution["update"] == "compiled" and keeps(found.candidate):
            (out / "candidates" / f"{found.candidate}.compiled").write_bytes(found.candidate.encode())
        driver.hear(found.candidate, {"event": "record", "record": found.model_dump(mode="json")})


def report_of(driver: StudyDriver, out: Path) -> Report:
    report = Report(out, "s1", CONFIG, 2000.0, lambda: 1.0)
    report.write(driver)
    return report


def promise_in(out: Path) -> tuple[Config, Promise]:
    config = load(out / "selected.yaml")
    assert config.tuned is not None
    return config, config.tuned


def by_kind(request: dict[str, Any]) -> float:
    """Compiled is faster, less so under a minute's load."""
    if request["config"]["execution"]["update"] != "compiled":
        return 2000.0
    return 2900.0 if request["protocol"]["least_seconds"] >= 60 else 3000.0


def test_a_candidate_that_was_cut_and_measured_again_has_found_the_compilation_of_those_between(tmp_path: Path) -> None:
    driver = study(tmp_path, verified=False)
    measure(driver, tmp_path, by_kind)
    space, base = driver.study.space, driver.records[0]
    made = next(record for record in driver.records if record.execution["update"] == "compiled")

    def record(number: int, threads: int, at: float, **changes: Any) -> TrialRecord:
        candidate = make_candidate(number, space.settle({**made.execution, "cpu_threads": threads}))
        names = {"candidate": candidate.id, "execution_identity": candidate.execution_identity}
        return made.model_copy(update={**names, "execution": candidate.execution, "timestamp": at, **changes})

    cut = {"fate": Fate.TIMED_OUT, "seconds": Seconds(start=1.0, total=2.0), "windows": [], "targets_per_second": None}
    warm = {"seconds": made.seconds.model_copy(update={"compile": 3.0})}
    records = [base, record(3, 2, 1.0, **cut), record(4, 1, 2.0), record(3, 2, 3.0, **warm)]
    again = Study(space, records=records)
    promise = build_promise(again, records[-1], CONFIG.with_execution(records[-1].execution), tmp_path)
    assert promise is not None
    assert promise.start_seconds == pytest.approx((base.environment["import_seconds"] or 0.0) + 1.0 + 3.0)


def test_an_unverified_choice_promises_what_the_search_measured(tmp_path: Path) -> None:
    driver = study(tmp_path, verified=False)
    measure(driver, tmp_path, by_kind)
    report_of(driver, tmp_path)
    config, promise = promise_in(tmp_path)
    assert config.execution.update == "compiled"
    assert promise.workload == config.workload_identity
    assert (promise.study, promise.verified, promise.processes) == ("s1", False, 1)
    assert promise.targets_per_second == pytest.approx(3000.0)
    assert promise.low < 3000.0 < promise.high
    assert (promise.device_kind, promise.device) == ("cpu", "a CPU")
    assert promise.versions == {"torch": "2.11.0", "driver": "570.1"}
    assert promise.attention == ("flash",)
    assert promise.kernel_milliseconds == {"matmul": 5.0, "other": 1.0}


def test_a_verified_one_promises_what_it_did_under_load(tmp_path: Path) -> None:
    driver = study(tmp_path, verified=True)
    measure(driver, tmp_path, by_kind)
    report_of(driver, tmp_path)
    _, promise = promise_in(tmp_path)
    assert (promise.verified, promise.processes) == (True, 1)
    assert promise.targets_per_second == pytest.approx(2900.0)
    # What a training imports itself, the start of a process that has it, and an update with a warm cache.
    assert promise.start_seconds == pytest.approx(4.0 + 1.0 + 3.0)


def test_the_latest_process_of_the_choice_keeps_the_file_and_the_others_go(tmp_path: Path) -> None:
    driver = study(tmp_path, verified=True)
    measure(driver, tmp_path, by_kind)
    report = report_of(driver, tmp_path)
    _, promise = promise_in(tmp_path)
    assert promise.compiled is not None
    assert promise.compiled.machine == "0123456789abcdef"
    assert promise.compiled.source == "f" * 64
    kept = tmp_path / promise.compiled.file
    assert kept.name.startswith(f"{promise.candidate}-v"), "verification's"
    assert promise.compiled.sha256 == hashlib.sha256(kept.name.removesuffix(".compiled").encode()).hexdigest()
    assert len(list(tmp_path.rglob("*.compiled"))) > 1, "any of them could still be chosen"
    report.finish()
    assert list(tmp_path.rglob("*.compiled")) == [kept]


def test_a_choice_that_left_no_file_names_none(tmp_path: Path) -> None:
    driver = study(tmp_path, verified=False)
    measure(driver, tmp_path, by_kind, keeps=lambda candidate: False)
    report_of(driver, tmp_path).finish()
    assert promise_in(tmp_path)[1].compiled is None


def test_an_eager_choice_is_promised_too(tmp_path: Path) -> None:
    driver = study(tmp_path, verified=False)
    measure(driver, tmp_path, lambda request: 5000.0 - by_kind(request))
    report_of(driver, tmp_path).finish()
    config, promise = promise_in(tmp_path)
    assert config.execution.update == "eager"
    assert promise.compiled is None
    assert not list(tmp_path.rglob("*.compiled"))


def test_a_study_of_a_selected_configuration_promises_anew(tmp_path: Path) -> None:
    """The old promise is none of the recipe's."""
    driver = study(tmp_path, verified=False)
    measure(driver, tmp_path, by_kind)
    report_of(driver, tmp_path)
    config, promise = promise_in(tmp_path)
    stale = promise.model_copy(update={"candidate": "c99", "targets_per_second": 1.0})
    Report(tmp_path, "s1", config.model_copy(update={"tuned": stale}), 2000.0, lambda: 1.0).write(driver)
    assert promise_in(tmp_path) == (config, promise)


def test_the_summary_says_what_each_candidate_took_to_compile(tmp_path: Path) -> None:
    driver = study(tmp_path, verified=False)
    measure(driver, tmp_path, by_kind)
    report_of(driver, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    ran = [row for row in summary["candidates"] if row["state"] == "complete"]
    found = {row["compile_seconds"] for row in ran}
    assert found == {20.0, 0.5}
    assert all(row["compile_seconds"] is None for row in summary["candidates"] if row not in ran)
