"""Predicts how many seconds a candidate will take: from the study's own records, and from priors where those are mute.

The priors are round figures seen on three machines, for one update of 20m (GPUs) or nano (CPU):
- GH200, torch 2.14: first update 18.1-18.3 s cold and 2.8-3.6 s warm in default mode, 15.0 s in reduce-overhead, 129 s
  in max-autotune, 0.6 s eager; targets/s at micro-batch 32: 1.26 M compiled, 0.62 M eager.
- H200, torch 2.11: 17-24 s cold and 2.7-3.5 s warm in default mode (90m 32.6 s cold), 18.3 s in reduce-overhead,
  0.5 s eager.
- Two x86 CPU cores, torch 2.13: 16 s cold and 2 s warm in default mode, 1 s eager; an update 0.56 s eager, 0.32 s
  compiled.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tinyllm_ray.execution import HOST_KEYS
from tinyllm_ray.records import Fate, Protocol, TrialRecord
from tinyllm_ray.search.fitting import DeviceKind


class Estimate(NamedTuple):
    """Seconds: what is expected, and what is hardly ever exceeded."""

    expected: float
    upper: float


@dataclass(frozen=True)
class Prediction:
    """Seconds of one candidate, from its process's start to its record."""

    start: Estimate
    compile: Estimate
    """The first update, as in `records.Seconds`."""
    warmup: Estimate
    windows: Estimate
    rest: Estimate
    """Proof, and ending the process."""

    @property
    def expected_seconds(self) -> float:
        return sum(part.expected for part in self._parts())

    @property
    def upper_seconds(self) -> float:
        """For admission: a candidate is started only when this much time is left."""
        return sum(part.upper for part in self._parts())

    def _parts(self) -> tuple[Estimate, ...]:
        return self.start, self.compile, self.warmup, self.windows, self.rest


PRIOR_START = Estimate(3.0, 10.0)
"""Forked from a process that has torch: 0.6-0.8 s to the first kernel; a bare process imports for 3-10 s."""

PRIOR_REST = Estimate(1.5, 4.0)

PRIOR_FIRST_UPDATE: Mapping[DeviceKind, Mapping[str, tuple[float, float]]] = {
    "cuda": {
        "eager": (1.5, 1.5),
        "default": (25.0, 4.0),
        "reduce-overhead": (20.0, 4.0),
        "max-autotune": (130.0, 4.0),
        "max-autotune-no-cudagraphs": (130.0, 4.0),
    },
    "cpu": {
        "eager": (1.0, 1.0),
        "default": (20.0, 3.0),
        "reduce-overhead": (20.0, 3.0),
        "max-autotune": (30.0, 3.0),
        "max-autotune-no-cudagraphs": (30.0, 3.0),
    },
}
"""(cold, warm) seconds of the first update beside the update itself, by device kind and kind of execution."""

PRIOR_WORK_PER_SECOND: Mapping[DeviceKind, Mapping[str, float]] = {
    "cuda": {"eager": 1.2e13, "compiled": 2.5e13},
    "cpu": {"eager": 8e9, "compiled": 1.2e10},
}
"""Parameters times targets a second; models larger than 20m reach more (H200: 5.5e13 at 90m)."""

UNSEEN_MACHINE = 3.0
"""Upper over expected seconds an update before this machine has run one: it may be a slower one."""

EAGER_OVER_COMPILED = Estimate(2.5, 4.0)
"""Seconds an update: 2.0 at micro-batch 32 to 2.9 at 4 on a GH200."""
COMPILED_OVER_EAGER = Estimate(0.5, 1.0)

SMALLER_MICRO_BATCH_POWER = 0.75
"""An update in r times as many micro-batches takes r**0.75 times as long (GH200: 0.76 eager, 0.6 compiled)."""

SAME_MARGIN = 1.2
"""Upper over expected where the same micro-batch and kind of update were timed; windows spread by 1-4%."""
OTHER_MARGIN = 1.5


@dataclass(frozen=True)
class CostModel:
    """Predictions for one recipe on one kind of device, from the records so far (oldest first)."""

    device_kind: DeviceKind
    work_per_update: float
    """Parameters times targets."""
    protocol: Protocol
    records: tuple[TrialRecord, ...] = ()

    def predict(self, execution: Mapping[str, Any]) -> Prediction:
        """Seconds of a candidate with these settings, all defaults settled."""
        update = self._update(execution)
        in_windows = self.protocol.windows * self.protocol.updates_per_window
        return Prediction(
            start=_learned([record.seconds.start for record in self.records], PRIOR_START),
            compile=self._first_update(execution, update),
            warmup=_times(update, self.protocol.warmup_updates - 1),
            windows=_times(update, in_windows),
            rest=_learned([_rest_seconds(record) for record in self.records], PRIOR_REST),
        )

    def _update(self, execution: Mapping[str, Any]) -> Estimate:
        """Seconds an update: from the most similar execution that was timed."""
        timed = [(record, seconds) for record in self.records if (seconds := record.seconds_per_update)]
        if not timed:
            rates = PRIOR_WORK_PER_SECOND[self.device_kind]
            expected = self.work_per_update / rates.get(execution["update"], rates["compiled"])
            return Estimate(expected, expected * UNSEEN_MACHINE)
        distances = [_distance(execution, record.execution) for record, _ in timed]
        nearest = min(distances)
        similar = [index for index, distance in enumerate(distances) if distance == nearest]
        seconds = statistics.median(timed[index][1] for index in similar)
        scale = _scale(timed[similar[-1]][0].execution, execution, self.device_kind)
        margin = SAME_MARGIN if nearest[:3] == (0, 0, 0) else OTHER_MARGIN
        return Estimate(seconds * scale.expected, seconds * scale.upper * margin)

    def _first_update(self, execution: Mapping[str, Any], update: Estimate) -> Estimate:
        """Seconds of the first update: cold for the first candidate of a compilation, warm for those that share it."""
        kind = _kind(execution)
        cold, warm = PRIOR_FIRST_UPDATE[self.device_kind].get(kind, PRIOR_FIRST_UPDATE[self.device_kind]["default"])
        samples, seen = _first_updates(self.records)
        is_warm = compilation(execution) in seen
        same = [seconds for name, was_warm, seconds in samples if name == kind and was_warm == is_warm]
        prior = warm if is_warm else cold * self._slowness(samples, kind)
        if kind == "eager":
            same = [seconds for name, _, seconds in samples if name == kind]
        guess = Estimate(prior + update.expected, 1.5 * prior + update.upper)
        # One sample may have been lucky: a cache that was warm for it need not be for the next candidate.
        floor = guess.upper if len(same) < 2 else 0.0
        learned = _learned(same, guess)
        return Estimate(learned.expected, max(learned.upper, floor))

    def _slowness(self, samples: Sequence[tuple[str, bool, float]], kind: str) -> float:
        """How much longer this model compiles than the prior says, judged by the other kinds; 1 at least."""
        priors = PRIOR_FIRST_UPDATE[self.device_kind]
        ratios = [
            seconds / priors[name][0]
            for name, was_warm, seconds in samples
            if name != kind and name != "eager" and name in priors and not was_warm
        ]
        return max(1.0, statistics.median(ratios)) if ratios and kind != "eager" else 1.0


def _learned(seconds: Iterable[float | None], prior: Estimate) -> Estimate:
    """The median of what was seen, and a quarter above its worst; `prior` where nothing was."""
    seen = [value for value in seconds if value is not None]
    return Estimate(statistics.median(seen), 1.25 * max(seen)) if seen else prior


def _times(estimate: Estimate, count: int) -> Estimate:
    return Estimate(estimate.expected * count, estimate.upper * count)


def _kind(execution: Mapping[str, Any]) -> str:
    return str(execution["compile_mode"] or execution["update"])


def compilation(execution: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What candidates that share compiled code have in common."""
    return tuple(sorted((key, value) for key, value in execution.items() if key not in HOST_KEYS))


def _first_updates(records: Iterable[TrialRecord]) -> tuple[list[tuple[str, bool, float]], set[tuple[Any, ...]]]:
    """Kind, whether its compilation had been made before, and seconds of every first update; and those compilations."""
    samples = []
    seen: set[tuple[Any, ...]] = set()
    for record in records:
        made = compilation(record.execution)
        seconds = record.seconds.compile
        if seconds is None and record.fate == Fate.TIMED_OUT and record.seconds.total is not None:
            # Cut while it compiled: it takes at least that long, and must not be tried again as if it were quick.
            samples.append((_kind(record.execution), False, record.seconds.total - (record.seconds.start or 0.0)))
        elif seconds is not None and record.fate != Fate.OUT_OF_MEMORY:
            samples.append((_kind(record.execution), made in seen, seconds))
            seen.add(made)
    return samples, seen


def _rest_seconds(record: TrialRecord) -> float | None:
    seconds = record.seconds
    if record.fate != Fate.COMPLETE or seconds.total is None:
        return None
    return seconds.total - sum(
        part or 0.0 for part in (seconds.start, seconds.compile, seconds.warmup, seconds.windows)
    )


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[int, float, float, int]:
    """How unlike two executions are in what an update costs, the most telling setting first."""
    micro = one["micro_batch_size"] / other["micro_batch_size"]
    threads = one["cpu_threads"] / other["cpu_threads"]
    rest = sum(one[key] != other.get(key) for key in one if key not in {"update", "micro_batch_size", "cpu_threads"})
    return int(one["update"] != other["update"]), max(micro, 1 / micro) - 1, max(threads, 1 / threads) - 1, rest


def _scale(timed: Mapping[str, Any], execution: Mapping[str, Any], device_kind: DeviceKind) -> Estimate:
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
