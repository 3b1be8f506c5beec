"""Sensors through the real pynvml where it finds no library, and through a small one of the same shape elsewhere."""

import builtins
import subprocess
from typing import Any

import pynvml
import pytest
import torch
from small_nvml import UUID, SmallNvml, unsupported

from tinyllm_ray.measure import gpu_sensors
from tinyllm_ray.measure.gpu_sensors import GpuSensors, open_sensors, uuid_of
from tinyllm_ray.records import GpuState


def opened(**changes: Any) -> tuple[GpuSensors, SmallNvml]:
    nvml = SmallNvml(**changes)
    sensors = open_sensors(UUID, nvml)
    assert sensors is not None
    return sensors, nvml


@pytest.mark.parametrize(
    "name",
    [
        *("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetHandleByUUID"),
        *("nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage"),
        *("nvmlDeviceGetTemperature", "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetCurrentClocksEventReasons"),
        *(f"nvmlClocksEventReason{reason}" for reason in gpu_sensors._REASONS),
    ],
)
def test_the_small_library_has_the_names_of_the_real_one(name: str) -> None:
    assert hasattr(pynvml, name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
class TestWithoutAnything:
    def test_the_real_library_finds_no_gpu(self) -> None:
        assert open_sensors(UUID) is None

    def test_no_device_no_sensors(self) -> None:
        assert open_sensors(None) is None

    def test_nothing_is_missed_where_the_package_is_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_import = builtins.__import__

        def without(name: str, *arguments: Any, **keywords: Any) -> Any:
            if name == "pynvml":
                raise ModuleNotFoundError(name)
            return real_import(name, *arguments, **keywords)

        monkeypatch.setattr(builtins, "__import__", without)
        gpu_sensors.find_nvml.cache_clear()
        try:
            assert open_sensors(UUID) is None
        finally:
            gpu_sensors.find_nvml.cache_clear()

    @pytest.mark.parametrize("error", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH])
    def test_a_driver_that_does_not_answer(self, error: int) -> None:
        assert open_sensors(UUID, SmallNvml(nvmlInit=pynvml.NVMLError(error))) is None

    def test_a_device_that_the_driver_does_not_know(self) -> None:
        assert open_sensors("MIG-1", SmallNvml()) is None


class TestReadings:
    def test_come_in_plain_units(self) -> None:
        sensors, nvml = opened()
        sensors.begin()
        nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] += 310_500
        assert sensors.read() == GpuState(
            sm_clock_mhz=1755,
            memory_clock_mhz=3201,
            power_watts=612.345,
            temperature_celsius=61,
            throttle_reasons=[],
            energy_joules=310.5,
        )

    def test_what_is_not_supported_is_none_and_nothing_else_goes_with_it(self) -> None:
        for name in ("nvmlDeviceGetPowerUsage", pynvml.NVML_CLOCK_MEM, "nvmlDeviceGetCurrentClocksEventReasons"):
            sensors, nvml = opened()
            nvml.answers[name] = unsupported()
            found = sensors.read()
            assert found is not None
            assert list(found.model_dump().values()).count(None) == 2, "that one, and energy without a beginning"
            assert found.temperature_celsius == 61

    def test_a_device_that_is_lost_says_nothing(self) -> None:
        sensors, nvml = opened()
        nvml.answers = dict.fromkeys(nvml.answers, pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST))
        sensors.begin()
        assert sensors.read() is None

    def test_an_energy_counter_that_stood_still_or_began_again_is_none_and_not_zero(self) -> None:
        sensors, nvml = opened()
        for counter in (5_000_000, 17):
            sensors.begin()
            nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] = counter
            state = sensors.read()
            assert state is not None
            assert state.energy_joules is None

    def test_each_window_counts_its_own_energy(self) -> None:
        sensors, nvml = opened()
        joules = []
        for _ in range(3):
            sensors.begin()
            nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] += 2_000
            state = sensors.read()
            joules.append(state.energy_joules if state else None)
            nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] += 700  # between windows
        assert joules == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("mask", "reasons", "throttled"),
    [
        (0, [], False),
        (pynvml.nvmlClocksEventReasonGpuIdle, ["gpu_idle"], False),
        (pynvml.nvmlClocksEventReasonApplicationsClocksSetting, ["applications_clocks_setting"], False),
        (pynvml.nvmlClocksEventReasonSwPowerCap, ["sw_power_cap"], True),
        (
            pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown,
            ["sw_power_cap", "hw_thermal_slowdown"],
            True,
        ),
        (0x400, ["unknown_0x400"], False),
    ],
)
def test_a_window_says_what_held_its_clocks(mask: int, reasons: list[str], throttled: bool) -> None:
    sensors, _ = opened(nvmlDeviceGetCurrentClocksEventReasons=mask)
    state = sensors.read()
    assert state is not None
    assert state.throttle_reasons == reasons
    assert state.throttled is throttled


@pytest.mark.parametrize(
    ("visible", "uuid"),
    [("0", UUID), ("0,1", UUID), ("7", None), (UUID, UUID), ("MIG-1", None), ("", None), ("NoDevFiles", None)],
)
def test_the_device_that_a_process_sees_has_a_uuid(visible: str, uuid: str | None) -> None:
    assert uuid_of(visible, SmallNvml()) == uuid


def test_unknown_is_not_unthrottled() -> None:
    assert GpuState().throttled is None


@pytest.mark.gpu
def test_a_gpu_under_load_tells_all() -> None:
    sensors = open_sensors(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    assert sensors is not None
    sensors.begin()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(400):
        matrix @ matrix
    torch.cuda.synchronize()
    state = sensors.read()
    assert state is not None
    assert None not in state.model_dump().values()
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.mem", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    assert str(state.memory_clock_mhz) in asked.stdout
