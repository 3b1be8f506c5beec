"""What is exported: a GPU's sensors where they tell, and no more of a study than is known."""

import threading
from typing import Any

import pytest
from small_nvml import UUID, SmallNvml, unsupported

from tinyllm_ray.cluster import metrics
from tinyllm_ray.cluster.metrics import GPU_GAUGES, STUDY_GAUGES, GpuGauges, Standing, StudyGauges, refresh
from tinyllm_ray.measure.gpu_sensors import open_sensors


class Gauges:
    """Notes what Ray's gauges are set to, by name and tags, as they would stand."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}

    def gauge(self, name: str, description: str, tags: tuple[str, ...]) -> Any:
        gauges = self

        class Gauge:
            def set(self, value: float | None, given: dict[str, str]) -> None:
                assert set(given) == set(tags)
                assert description
                if value is not None:
                    gauges.values[(name.removeprefix("tinyllm_"), *(given[tag] for tag in tags))] = value

        return Gauge()


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> Gauges:
    found = Gauges()
    monkeypatch.setattr(metrics, "Gauge", found.gauge)
    return found


def test_a_candidate_that_has_ended_is_not_shown_as_running(gauges: Gauges) -> None:
    study = StudyGauges("s")
    study.show(Standing(None, None, 90.0, 100.0, running=frozenset({"one"})))
    assert gauges.values["running", "s", "one"] == 1
    assert not any(name[0].endswith("targets_per_second") for name in gauges.values)
    study.show(Standing(7.0, 5.0, 80.0, 100.0, frozenset({"two"}), {"one": 7.0}, {"complete": 1}))
    assert (gauges.values["running", "s", "one"], gauges.values["running", "s", "two"]) == (0, 1)
    assert gauges.values["candidate_targets_per_second", "s", "one"] == 7.0
    assert (gauges.values["trials", "s", "complete"], gauges.values["trials", "s", "lost"]) == (1, 0)
    assert {f"tinyllm_{name}" for name, *_ in gauges.values} == set(STUDY_GAUGES)


def test_a_gpu_exports_what_its_sensors_tell(gauges: Gauges) -> None:
    sensors = open_sensors(UUID, SmallNvml(nvmlDeviceGetCurrentClocksEventReasons=4))
    assert sensors is not None
    gpu = GpuGauges(sensors, UUID)
    gpu.candidate = "20m mb8"
    gpu.show()
    assert gauges.values == {
        ("gpu_sm_clock_mhz", UUID, "20m mb8"): 1755,
        ("gpu_memory_clock_mhz", UUID, "20m mb8"): 3201,
        ("gpu_power_watts", UUID, "20m mb8"): 612.345,
        ("gpu_temperature_celsius", UUID, "20m mb8"): 61,
        ("gpu_throttled", UUID, "20m mb8"): 1,
    }
    assert {f"tinyllm_{name}" for name, *_ in gauges.values} == set(GPU_GAUGES)


def test_a_reading_that_the_device_does_not_support_is_left_out(gauges: Gauges) -> None:
    sensors = open_sensors(UUID, SmallNvml(nvmlDeviceGetPowerUsage=unsupported()))
    assert sensors is not None
    GpuGauges(sensors, UUID).show()
    assert len(gauges.values) == len(GPU_GAUGES) - 1
    assert ("gpu_power_watts", UUID, "") not in gauges.values


def test_what_cannot_be_exported_is_said_once_and_ends_nothing_else() -> None:
    said: list[str] = []
    done = threading.Event()

    def failed(why: str) -> None:
        said.append(why)
        done.set()

    def show() -> None:
        raise OSError("Ray is gone")

    refresh(show, failed)
    done.wait()
    assert said == ["OSError: Ray is gone"]
