"""How unlike two executions are in what an update costs, and what the seconds of one say of the other's."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tinyllm_ray.search.fitting import DeviceKind


class Estimate(NamedTuple):
    """Seconds: what is expected, and what is hardly ever exceeded."""

    expected: float
    upper: float


EAGER_OVER_COMPILED = Estimate(2.5, 4.0)
"""Seconds an update: 2.0 at micro-batch 32 to 2.9 at 4 on a GH200."""
COMPILED_OVER_EAGER = Estimate(0.5, 1.0)

SMALLER_MICRO_BATCH_POWER = 0.75
"""An update in r times as many micro-batches takes r**0.75 times as long (GH200: 0.76 eager, 0.6 compiled)."""

TELLING = ("update", "micro_batch_size", "cpu_threads", "compile_mode", "sdpa_backend")
"""Settings that an update's seconds are predicted by, for budgets; finer differences are for the search."""


def distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[int, float, float, int]:
    """How unlike two executions are in what an update costs, the most telling setting first."""
    micro = one["micro_batch_size"] / other["micro_batch_size"]
    threads = one["cpu_threads"] / other["cpu_threads"]
    rest = sum(one[key] != other[key] for key in TELLING[3:])
    return int(one["update"] != other["update"]), max(micro, 1 / micro) - 1, max(threads, 1 / threads) - 1, rest


def scaled(timed: Mapping[str, Any], execution: Mapping[str, Any], device_kind: DeviceKind) -> Estimate:
    """Seconds an update of `execution` relative to those of `timed`."""
    expected = upper = 1.0
    micro_batches = timed["micro_batch_size"] / execution["micro_batch_size"]
    if micro_batches > 1:
        expected, upper = micro_batches**SMALLER_MICRO_BATCH_POWER, micro_batches
    if timed["update"] != execution["update"]:
        change = EAGER_OVER_COMPILED if execution["update"] == "eager" else COMPILED_OVER_EAGER
        if "eager" in {timed["update"], execution["update"]}:
            expected, upper = expected * change.expected, upper * change.upper
    fewer_threads = timed["cpu_threads"] / execution["cpu_threads"]
    if device_kind == "cpu" and fewer_threads > 1:
        expected, upper = expected * fewer_threads, upper * fewer_threads
    return Estimate(expected, upper)
