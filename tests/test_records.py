"""Records survive the journal, and have a place for all that the reference system recorded."""

import functools
import json
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tinyllm_ray import journal
from tinyllm_ray.errors import TinyllmRayError
from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.measure.environment import collect_environment
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import (
    Device,
    Fate,
    GpuState,
    KernelCategory,
    KernelTime,
    Memory,
    Parity,
    Proof,
    Seconds,
    TrajectoryPoint,
    TrialRecord,
    Window,
    read_records,
)
from tinyllm_ray.yamlfile import read_mapping

FIGURES = st.floats(min_value=0, max_value=1e12)
WINDOWS = st.builds(
    Window,
    index=st.integers(0, 10),
    updates=st.integers(1, 100),
    targets=st.integers(1, 10**9),
    seconds=FIGURES,
    targets_per_second=st.floats(min_value=1, max_value=1e12),
    data_wait_seconds=FIGURES,
    loss=st.none() | FIGURES,
    grad_norm=st.none() | FIGURES,
    timestamp=FIGURES,
    gpu=st.none()
    | st.builds(
        GpuState,
        sm_clock_mhz=st.none() | st.integers(0, 3000),
        energy_joules=st.none() | FIGURES,
        throttle_reasons=st.none() | st.lists(st.sampled_from(["gpu_idle", "sw_power_cap"]), max_size=2),
    ),
)
KERNELS = st.builds(
    KernelTime,
    name=st.text(max_size=5),
    category=st.sampled_from(get_args(KernelCategory)),
    milliseconds=FIGURES,
    launches=FIGURES,
)
PROOFS = st.builds(
    Proof,
    kernel_source=st.sampled_from(["device", "operators", None]),
    attention_seen=st.lists(st.text(max_size=5), max_size=2),
    parity=st.none()
    | st.builds(
        Parity,
        loss=st.none() | FIGURES,
        reference_loss=FIGURES,
        relative_loss_error=st.none() | FIGURES,
        relative_gradient_error=FIGURES,
    ),
    trajectory=st.lists(st.builds(TrajectoryPoint, loss=st.none() | FIGURES, grad_norm=FIGURES), max_size=2),
)


def a_record(**changes: Any) -> TrialRecord:
    values: dict[str, Any] = {
        "study": "s",
        "candidate": "c1",
        "kind": "measurement",
        "fate": Fate.COMPLETE,
        "recipe_identity": "r",
        "execution_identity": "e",
        "cache_identity": None,
        "source_identity": "x",
        "source_dirty": None,
        "execution": ExecutionConfig().model_dump(mode="json"),
        "timestamp": 1e9,
    }
    return TrialRecord(**values | changes)


RECORDS = st.builds(
    a_record,
    fate=st.sampled_from(Fate),
    reason=st.none() | st.text(max_size=30),
    protocol=st.none() | st.builds(Protocol),
    devices=st.lists(
        st.builds(Device, kind=st.sampled_from(["cuda", "cpu"]), name=st.text(), host=st.text()), max_size=2
    ),
    seconds=st.builds(Seconds, start=st.none() | FIGURES, total=st.none() | FIGURES),
    windows=st.lists(WINDOWS, max_size=3),
    targets_per_second=st.none() | FIGURES,
    memory=st.builds(Memory, used_bytes=st.none() | st.integers(0, 2**40)),
    kernels=st.none() | st.lists(KERNELS, max_size=2),
    proof=st.none() | PROOFS,
    environment=st.dictionaries(st.text(max_size=5), st.none() | st.text(max_size=5) | FIGURES, max_size=3),
)


@given(records=st.lists(RECORDS, max_size=4))
def test_records_come_back_from_the_journal_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, records: list[TrialRecord]
) -> None:
    path = tmp_path_factory.getbasetemp() / "records.jsonl"
    path.unlink(missing_ok=True)
    journal.append_lines(path, [record.model_dump(mode="json") for record in records])
    with path.open("ab") as file:
        file.write(b'{"schema_version":1,"study":')  # a crash in the middle of the next one
    assert read_records(path) == records


def a_window(index: int, gpu: GpuState | None) -> Window:
    return Window(
        index=index,
        updates=10,
        targets=1000,
        seconds=2.0,
        targets_per_second=500.0,
        data_wait_seconds=0.0,
        loss=4.0,
        grad_norm=1.0,
        timestamp=1e9,
        gpu=gpu,
    )


@pytest.mark.parametrize(
    ("joules", "targets_per_joule"),
    [
        ([100.0, 300.0], 5.0),
        ([100.0, None], None),  # of two windows' targets one window's energy says nothing
        ([None, None], None),
        ([], None),
    ],
)
def test_targets_a_joule_are_of_all_windows_or_of_none(
    joules: list[float | None], targets_per_joule: float | None
) -> None:
    windows = [a_window(index, GpuState(energy_joules=value)) for index, value in enumerate(joules)]
    assert a_record(windows=windows).targets_per_joule == targets_per_joule
    assert a_record(windows=[*windows, a_window(9, None)]).targets_per_joule is None


def test_throttled_windows_are_named_and_unknown_is_not_none_of_them() -> None:
    states = [GpuState(throttle_reasons=["gpu_idle"]), None, GpuState(throttle_reasons=["sw_power_cap"]), GpuState()]
    windows = [a_window(index, state) for index, state in enumerate(states)]
    assert a_record(windows=windows).throttled_windows == [2]
    assert a_record(windows=windows[:1]).throttled_windows == []
    assert a_record(windows=windows[1:2]).throttled_windows is None
    assert a_record().throttled_windows is None


def test_a_protocol_says_how_long_its_windows_take_at_most() -> None:
    assert Protocol().longest_seconds(0.02) == pytest.approx(6.0)
    adaptive = Protocol(version="adaptive")
    assert adaptive.longest_seconds(0.1) == pytest.approx(12 * 0.6)
    assert adaptive.longest_seconds(4.0) == pytest.approx(12 * 4.5)
    assert 60 <= Protocol(version="adaptive", least_seconds=60).longest_seconds(0.1) <= 61


def test_a_study_without_a_file_has_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "trials.jsonl") == []


def test_a_record_takes_the_environment_of_this_machine() -> None:
    record = a_record(environment=this_environment())
    assert TrialRecord.model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize(
    "changes",
    [
        {"targets_per_second": float("nan")},
        {"first_update_seconds": float("inf")},
        {"seconds": {"start": float("inf")}},
        {"fate": "pruned"},
        {"kind": "test"},
        {"schema_version": 2},
        {"tokens_per_second": 1.0},
        {"windows": [{"index": 0}]},
        {"kernels": [{"name": "k", "category": "attention", "milliseconds": 1.0, "launches": 1.0}]},
        {"proof": {"parity": {"updates": 0, "targets": 1, "loss": float("nan")}}},
        {"protocol": {"windows": 0}},
    ],
)
def test_what_is_no_record_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        a_record(**changes)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_bytes(b"{}x\n")
    with pytest.raises(TinyllmRayError, match=r"trials\.jsonl: line 1"):
        read_records(path)


def test_a_record_of_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    later = a_record().model_dump(mode="json") | {"schema_version": 2}
    path.write_text(f"{a_record().model_dump_json()}\n{json.dumps(later)}\n")
    with pytest.raises(TinyllmRayError, match=r"trials\.jsonl: line 2: schema_version: 2 is not allowed"):
        read_records(path)


def windows_of(*rates: float) -> list[Window]:
    return [
        Window(
            index=i,
            updates=1,
            targets=1,
            seconds=1,
            targets_per_second=rate,
            data_wait_seconds=0,
            loss=1,
            grad_norm=1,
            timestamp=0,
        )
        for i, rate in enumerate(rates)
    ]


@pytest.mark.parametrize(
    ("rates", "median", "spread"),
    [([99, 100, 103], 100, 0.02), ([100, 100], 100, 0), ([100], 100, None), ([], None, None), ([1, 2], None, None)],
)
def test_the_spread_is_half_the_range_over_the_median(
    rates: list[float], median: float | None, spread: float | None
) -> None:
    assert a_record(windows=windows_of(*rates), targets_per_second=median).spread == spread


# Every key path of the reference system's records has a field here, or a written "no".

REFERENCE = read_mapping(Path(__file__).with_name("reference_keys.yaml"))


@functools.cache
def this_environment() -> dict[str, Any]:
    return collect_environment()


def find(field: str) -> None:
    """Follow a dotted field through the models; AssertionError where it leads nowhere."""
    annotation: Any = TrialRecord
    first, *rest = field.split(".")
    if first == "execution":
        annotation, first, *rest = ExecutionConfig, *rest
    elif first == "environment":
        value: Any = this_environment()
        for part in rest:
            assert part in value, f"the environment has no {part}"
            value = value[part]
        return
    for part in (first, *rest):
        name, is_list = part.removesuffix("[]"), part.endswith("[]")
        assert isinstance(annotation, type), f"{annotation} has no fields"
        assert issubclass(annotation, BaseModel), f"{annotation} has no fields"
        assert name in annotation.model_fields, f"{annotation.__name__} has no {name}"
        annotation = _without_none(annotation.model_fields[name].annotation)
        assert (get_origin(annotation) is list) == is_list, f"{part} of {field}: a list takes []"
        if is_list:
            (annotation,) = get_args(annotation)


def _without_none(annotation: Any) -> Any:
    options = [option for option in get_args(annotation) if option is not type(None)]
    return options[0] if type(None) in get_args(annotation) else annotation


@pytest.mark.parametrize("file", REFERENCE)
def test_every_reference_key_has_a_field_or_a_written_no(file: str) -> None:
    for path, field in REFERENCE[file].items():
        if field.startswith("no: "):
            assert len(field.removeprefix("no: ").split()) >= 2, f"{path}: a no has its reason"
        else:
            find(field)


def test_the_reference_has_three_files() -> None:
    assert {file: len(paths) for file, paths in REFERENCE.items()} == {
        "gh200_results.json": 119,
        "gh200_startup.json": 55,
        "gh200_loader.json": 69,
    }


@pytest.mark.parametrize(
    "field",
    [
        *("tokens", "windows.loss", "windows[].tokens", "seconds[].start", "seconds.begin", "timestamp.x", "kernels"),
        *("proof.x", "proof.parity.x", "kernels[].count", "execution.layers", "environment.x"),
    ],
)
def test_the_search_for_fields_finds_no_field_that_is_not_there(field: str) -> None:
    with pytest.raises(AssertionError):
        find(field)
