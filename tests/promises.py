"""A promise to put into configurations."""

from importlib.metadata import version
from typing import Any

from tinyllm_ray.config import Config
from tinyllm_ray.measure.environment import devices
from tinyllm_ray.promise import Promise


def promised(config: Config, targets_per_second: float = 1000.0, **changes: Any) -> Config:
    """`config` with a promise of this throughput on this device."""
    device = devices()[0]
    values = {
        "study": "20260101-000000-abcdef",
        "candidate": "c07",
        "workload": config.workload_identity,
        "targets_per_second": targets_per_second,
        "low": 0.995 * targets_per_second,
        "high": 1.005 * targets_per_second,
        "processes": 4,
        "verified": True,
        "start_seconds": 2.5,
        "device_kind": device.kind,
        "device": device.name,
        "versions": {"torch": version("torch")},
        "attention": ("flash",),
        "kernel_milliseconds": {},
    }
    return config.model_copy(update={"tuned": Promise.model_validate(values | changes)})
