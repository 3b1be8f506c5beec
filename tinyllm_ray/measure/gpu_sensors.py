"""A GPU's clocks, power, temperature, throttle reasons and energy, as the driver's NVML tells them.

NVML is the library below nvidia-smi (https://docs.nvidia.com/deploy/nvml-api, bound by nvidia-ml-py). It needs no CUDA
context and makes none. Everything is optional: without the library, without a GPU, on a MIG slice or for a reading
that the device does not support the field is None, never 0.

Cost: six calls, answered from the driver's memory in some ten microseconds each, at the end of a window after the
wait for the device and outside the timed part, and one before the window. What they say is therefore of the moment
after the load: clocks and throttle reasons do not change within that time, power is the driver's average.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from tinyllm_ray.records import GpuState

_Reading = TypeVar("_Reading")

_REASONS = {
    "GpuIdle": "gpu_idle",
    "ApplicationsClocksSetting": "applications_clocks_setting",
    "SwPowerCap": "sw_power_cap",
    "HwSlowdown": "hw_slowdown",
    "SyncBoost": "sync_boost",
    "SwThermalSlowdown": "sw_thermal_slowdown",
    "HwThermalSlowdown": "hw_thermal_slowdown",
    "HwPowerBrakeSlowdown": "hw_power_brake_slowdown",
    "DisplayClockSetting": "display_clock_setting",
}
"""NVML's names of the bits, without their prefix, and ours."""


class GpuSensors:
    """The sensors of one device, for `measure.windows`."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml` is the module pynvml, initialised, and `handle` its device."""
        self._nvml = nvml
        self._handle = handle
        self._energy_before: int | None = None

    def begin(self) -> None:
        """A window begins: its energy counts from here."""
        self._energy_before = self._millijoules()

    def read(self) -> GpuState | None:
        """All sensors now, and the energy since `begin`; None where the device tells nothing at all."""
        nvml, handle = self._nvml, self._handle
        energy = self._millijoules()  # first, as it is the only one that counts on
        before, self._energy_before = self._energy_before, energy
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        state = GpuState(
            sm_clock_mhz=self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            throttle_reasons=self._reasons(),
            # The counter is updated every 20 to 100 ms, and starts again when the driver is reloaded.
            energy_joules=None if energy is None or before is None or energy <= before else (energy - before) / 1000,
        )
        return state if state != GpuState() else None

    def _millijoules(self) -> int | None:
        return self._ask(lambda: int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)))

    def _reasons(self) -> list[str] | None:
        mask = self._ask(lambda: int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)))
        if mask is None:
            return None
        names = [ours for theirs, ours in _REASONS.items() if mask & self._bit(theirs)]
        unknown = mask & ~sum(map(self._bit, _REASONS))
        return names + ([f"unknown_0x{unknown:x}"] if unknown else [])

    def _bit(self, reason: str) -> int:
        return int(getattr(self._nvml, f"nvmlClocksEventReason{reason}"))

    def _ask(self, question: Callable[[], _Reading]) -> _Reading | None:
        try:
            return question()
        except self._nvml.NVMLError:  # not supported here, or the device is lost, which the trial will notice itself
            return None


def open_sensors(identifier: str | None, nvml: Any = None) -> GpuSensors | None:
    """The sensors of the device with that UUID, like `GPU-8f6b...`; None where they cannot be had.

    `nvml` is the module to ask, pynvml unless given.
    """
    if identifier is None:
        return None
    nvml = nvml or find_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        return GpuSensors(nvml, nvml.nvmlDeviceGetHandleByUUID(identifier))
    except nvml.NVMLError:
        return None


def uuid_of(visible: str, nvml: Any = None) -> str | None:
    """The UUID of the first device of a CUDA_VISIBLE_DEVICES, which names it by number or UUID; None where none is.

    NVML numbers devices by their place on the bus, as CUDA does for devices of one kind. `nvml` as in `open_sensors`.
    """
    first = visible.split(",")[0].strip()
    if not first.isdigit():
        return first if first.startswith("GPU-") else None  # a MIG slice has no sensors of its own
    nvml = nvml or find_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(first))))
    except nvml.NVMLError:
        return None


@functools.cache
def find_nvml() -> Any:
    """The module pynvml, or None: an environment put together by hand may lack it."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
