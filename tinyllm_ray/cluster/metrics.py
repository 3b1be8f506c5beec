"""What a running study exports through Ray's metrics: how it stands, from its process, and GPU sensors, from trials.

Ray hands a gauge to its node's metrics endpoint every 10 s (`RAY_metrics_report_interval_ms`), prefixes it with `ray_`,
and drops one that is not set again within two such intervals; so everything is set every REFRESH_SECONDS
(https://docs.ray.io/en/latest/ray-observability/user-guides/add-app-metrics.html).
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import ray
from ray.util.metrics import Gauge

from tinyllm_ray.measure.gpu_sensors import GpuSensors, open_sensors, uuid_of
from tinyllm_ray.records import Fate

REFRESH_SECONDS = 5.0
_LAST_SECONDS = 1.0
"""For a last round, which takes a millisecond."""

STUDY_GAUGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "tinyllm_best_targets_per_second": ("Throughput of the fastest candidate that is believed", ("study",)),
    "tinyllm_baseline_targets_per_second": ("Throughput of the baseline", ("study",)),
    "tinyllm_budget_left_seconds": ("Seconds of the budget left for measuring", ("study",)),
    "tinyllm_budget_seconds": ("The study's whole budget", ("study",)),
    "tinyllm_running": ("1 for a candidate that is running, 0 once it has ended", ("study", "candidate")),
    "tinyllm_candidate_targets_per_second": ("Throughput of a measured candidate", ("study", "candidate")),
    "tinyllm_trials": ("Trials that have ended so far, by their fate", ("study", "fate")),
}
"""Name, description and tags of what a study's process exports."""

_GPU_TAGS = ("gpu", "candidate")
GPU_GAUGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "tinyllm_gpu_sm_clock_mhz": ("Clock of the GPU's multiprocessors", _GPU_TAGS),
    "tinyllm_gpu_memory_clock_mhz": ("Clock of the GPU's memory", _GPU_TAGS),
    "tinyllm_gpu_power_watts": ("Power the GPU draws, the driver's average", _GPU_TAGS),
    "tinyllm_gpu_temperature_celsius": ("The GPU's temperature", _GPU_TAGS),
    "tinyllm_gpu_throttled": ("1 where power or heat holds the GPU's clocks down", _GPU_TAGS),
}
"""What a trial's process exports of the GPU that it has."""


@dataclass(frozen=True)
class Standing:
    """A study at one moment; what is None is not exported."""

    best_targets_per_second: float | None
    baseline_targets_per_second: float | None
    budget_left_seconds: float
    budget_seconds: float
    running: frozenset[str] = frozenset()
    """Names of the candidates that are running."""
    candidates: Mapping[str, float] = field(default_factory=dict)
    """Targets a second by candidate."""
    trials: Mapping[str, int] = field(default_factory=dict)
    """Ended trials by fate."""


class StudyGauges:
    """The gauges of one study."""

    def __init__(self, study: str) -> None:
        self._study = study
        self._running: frozenset[str] = frozenset()

    @functools.cached_property
    def _gauges(self) -> dict[str, Gauge]:
        return _gauges(STUDY_GAUGES)

    def show(self, now: Standing) -> None:
        """Export the study as it stands."""
        self._set("tinyllm_best_targets_per_second", now.best_targets_per_second)
        self._set("tinyllm_baseline_targets_per_second", now.baseline_targets_per_second)
        self._set("tinyllm_budget_left_seconds", now.budget_left_seconds)
        self._set("tinyllm_budget_seconds", now.budget_seconds)
        # One that has ended is set to 0 once: left alone, it would stay 1 until Ray drops it.
        for candidate in now.running | self._running:
            self._set("tinyllm_running", float(candidate in now.running), candidate=candidate)
        self._running = now.running
        for candidate, rate in now.candidates.items():
            self._set("tinyllm_candidate_targets_per_second", rate, candidate=candidate)
        for fate in Fate:
            self._set("tinyllm_trials", now.trials.get(fate.value, 0), fate=fate.value)

    def _set(self, name: str, value: float | None, **tags: str) -> None:
        if value is not None:
            self._gauges[name].set(value, {"study": self._study, **tags})


class GpuGauges:
    """The gauges of the GPU that this process has."""

    def __init__(self, sensors: GpuSensors, gpu: str) -> None:
        """`gpu` is the device's UUID."""
        self.candidate = ""
        """Name of the candidate that runs on it."""
        self._sensors = sensors
        self._gpu = gpu

    @functools.cached_property
    def _gauges(self) -> dict[str, Gauge]:
        return _gauges(GPU_GAUGES)

    def show(self) -> None:
        """Export what the sensors say now; a reading that the device does not support is left out."""
        state = self._sensors.read()
        if state is None:
            return
        tags = {"gpu": self._gpu, "candidate": self.candidate}
        readings = state.model_dump() | {"throttled": None if state.throttled is None else float(state.throttled)}
        for name, gauge in self._gauges.items():
            gauge.set(readings[name.removeprefix("tinyllm_gpu_")], tags)  # None sets nothing


@contextmanager
def exporting(study: str, look: Callable[[], Standing], failed: Callable[[str], None]) -> Iterator[None]:
    """Export a study until the end of the context; `failed` is told why where that ends sooner."""
    gauges = StudyGauges(study)
    stop = refresh(lambda: gauges.show(look()), failed)
    try:
        yield
    finally:
        stop()


def export_gpu() -> GpuGauges | None:
    """Export the sensors of this Ray worker's GPU as long as it lives; None where it has none, or none that tells."""
    gpu = uuid_of(os.environ.get("CUDA_VISIBLE_DEVICES", "")) if ray.get_gpu_ids() else None
    sensors = open_sensors(gpu)
    if gpu is None or sensors is None:
        return None
    gauges = GpuGauges(sensors, gpu)
    refresh(gauges.show, lambda why: print(f"GPU sensors are not exported any more: {why}", flush=True))
    return gauges


def refresh(show: Callable[[], None], failed: Callable[[str], None]) -> Callable[[], None]:
    """Call `show` now and every REFRESH_SECONDS, in a thread of its own; gives what ends that.

    What `show` raises is told once and ends it too: watching is worth no study.
    """
    stop = threading.Event()

    def work() -> None:
        try:
            show()
            while not stop.wait(REFRESH_SECONDS):
                show()
        except Exception as error:
            failed(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="metrics", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(_LAST_SECONDS)  # before Ray is shut down under it

    return end


def _gauges(described: Mapping[str, tuple[str, tuple[str, ...]]]) -> dict[str, Gauge]:
    return {name: Gauge(name, description, tags) for name, (description, tags) in described.items()}
