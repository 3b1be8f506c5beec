"""A small NVML of the shape of the real one, with one H200."""

from typing import Any

import pynvml

UUID = "GPU-5a0b3c1d-0000-1111-2222-333344445555"


class SmallNvml:
    """One H200 in NVML's units: MHz, milliwatts, millijoules since the driver was loaded; the constants are real."""

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, **changes: Any) -> None:
        self.answers: dict[str, Any] = {
            "nvmlDeviceGetPowerUsage": 612_345,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            pynvml.NVML_CLOCK_SM: 1755,
            pynvml.NVML_CLOCK_MEM: 3201,
            "nvmlDeviceGetUUID": UUID,
            "nvmlInit": None,
        } | changes

    def _answer(self, name: Any) -> Any:
        if isinstance(self.answers[name], Exception):
            raise self.answers[name]
        return self.answers[name]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index != 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        assert handle == "handle"
        return int(self._answer(clock))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlClocksEventReason"):
            return getattr(pynvml, name)
        if name in self.answers:
            return lambda *arguments: self._answer(name)
        raise AttributeError(name)


def unsupported() -> Exception:
    error: Exception = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return error
