"""Predicts what seconds a candidate will take, from the study's own records, and from priors where those are mute."""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.earlier import OWN, Origin
from tinyllm_ray.search.effects import CompilePrior, EffectModel, Observation
from tinyllm_ray.search.first_updates import FirstUpdate, first_updates
from tinyllm_ray.search.fitting import DeviceKind
from tinyllm_ray.search.kinds import compilation, kind_of
from tinyllm_ray.search.priors import Priors


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


class Starts(NamedTuple):
    """Seconds of a training before it runs at full speed."""

    start: float
    cold: float
    """The first update with its compilation."""
    warm: float
    """The first update with its compilation cached."""


PRIOR_START = Estimate(3.0, 10.0)
"""Forked from a process that has torch: 0.6-0.8 s to the first kernel; a bare process imports for 3-10 s."""

PRIOR_REST = Estimate(1.5, 4.0)

UNSEEN_MACHINE = 3.0
"""Upper over expected seconds an update before this machine has run one: it may be a slower one."""

UNSEEN_SIZE = 2.0
"""The same where it has run another size of model, in proportion to the parameters."""

EAGER_OVER_COMPILED = Estimate(2.5, 4.0)
"""Seconds an update: 2.0 at micro-batch 32 to 2.9 at 4 on a GH200."""
COMPILED_OVER_EAGER = Estimate(0.5, 1.0)

SMALLER_MICRO_BATCH_POWER = 0.75
"""An update in r times as many micro-batches takes r**0.75 times as long (GH200: 0.76 eager, 0.6 compiled)."""

COMPILE_NOISE = 0.1
"""Standard deviation of a compilation's seconds, as a logarithm: 18.8 to 22.6 s in one study on an H200."""

CERTAIN = 2.0
"""Standard deviations from the expected to the upper figure."""

COMPILED = ExecutionConfig(update="compiled", micro_batch_size=32, cpu_threads=8).model_dump(mode="json")
"""What effects on compilations count from before anything is recorded."""

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
    priors: Priors | None = None
    """All machines' unless given."""

    def predict(self, execution: Mapping[str, Any], *, warm: bool = False) -> Prediction:
        """Seconds of a candidate with these settings, all defaults settled; `warm`: its compilation is cached."""
        update = self._update(execution)
        longest = self.protocol.longest_seconds
        return Prediction(
            start=self._start,
            compile=self._first_update(execution, update, warm),
            warmup=_times(update, self.protocol.warmup_updates - 1),
            windows=Estimate(longest(update.expected), longest(update.upper)),
            rest=self._rest,
        )

    def _update(self, execution: Mapping[str, Any]) -> Estimate:
        """Seconds an update: from the most similar execution that was timed."""
        key = tuple(execution[name] for name in _TELLING)
        if key not in self._updates:
            self._updates[key] = self._fresh_update(execution)
        return self._updates[key]

    def _fresh_update(self, execution: Mapping[str, Any]) -> Estimate:
        timed = [(record, seconds) for record in self.records if (seconds := record.seconds_per_update)]
        if not timed:
            expected = self.work_per_update / self._priors.work_per_second(execution["update"])
            return Estimate(expected, expected * (UNSEEN_SIZE if self._priors.earlier else UNSEEN_MACHINE))
        distances = [_distance(execution, record.execution) for record, _ in timed]
        nearest = min(distances)
        similar = [index for index, distance in enumerate(distances) if distance == nearest]
        seconds = statistics.median(timed[index][1] for index in similar)
        scale = _scale(timed[similar[-1]][0].execution, execution, self.device_kind)
        margin = SAME_MARGIN if nearest[:3] == (0, 0, 0) else OTHER_MARGIN
        return Estimate(seconds * scale.expected, seconds * scale.upper * margin)

    def starts(self, execution: Mapping[str, Any]) -> Starts:
        """What a training with these settings spends before its updates, by what was seen of the compilation."""
        update = self._update(execution)
        mine = self._compiled.get(compilation(execution), [])
        cold = max(mine) if mine else self._first_update(execution, update, False).expected
        # Of its kind rather than its own: one start differs from the next by more than kinds' candidates do.
        warm = self._first_update(execution, update, True).expected
        return Starts(self._start.expected, cold, min(warm, cold))

    @functools.cached_property
    def _start(self) -> Estimate:
        return self._learned_of(lambda record: record.seconds.start, PRIOR_START)

    @functools.cached_property
    def _rest(self) -> Estimate:
        return self._learned_of(_rest_seconds, PRIOR_REST)

    def _learned_of(self, part: Callable[[TrialRecord], float | None], prior: Estimate) -> Estimate:
        """Seconds of a part, by this study's records, else by earlier studies', else by `prior`."""
        earlier = _learned([part(record) for study in self._priors.earlier for record in study.records], prior)
        return _learned([part(record) for record in self.records], earlier)

    @functools.cached_property
    def _samples(self) -> list[FirstUpdate]:
        return first_updates(self.records)

    @property
    def _all_samples(self) -> list[tuple[Origin, list[FirstUpdate]]]:
        """Earlier studies' as well; a compilation's seconds hardly go by the sizes of what is compiled."""
        earlier = enumerate(self._priors.earlier, start=1)
        return [(OWN, self._samples), *((Origin(number, 0.0), study.first_updates) for number, study in earlier)]

    @functools.cached_property
    def _compiled(self) -> dict[tuple[Any, ...], list[float]]:
        """Seconds of the first updates of each compilation that was made."""
        made: dict[tuple[Any, ...], list[float]] = {}
        for sample in self._samples:
            if sample.compilation is not None:
                made.setdefault(sample.compilation, []).append(sample.seconds)
        return made

    @functools.cached_property
    def _colds(self) -> dict[tuple[Any, ...], Estimate]:
        return {}

    @functools.cached_property
    def _updates(self) -> dict[tuple[Any, ...], Estimate]:
        return {}

    @property
    def _priors(self) -> Priors:
        return self.priors or Priors(self.device_kind)

    def prepare(self, executions: Iterable[Mapping[str, Any]]) -> None:
        """Make the predictions of many compilations at once, which is quicker than one by one."""
        made = {compilation(execution): execution for execution in executions}
        wanted = {key: execution for key, execution in made.items() if key not in self._colds}
        if not wanted:
            return
        means, sds = self._compile_model.predict(list(wanted.values()))
        for key, mean, sd in zip(wanted, means, sds, strict=True):
            self._colds[key] = Estimate(math.exp(mean), math.exp(mean + CERTAIN * sd))

    def _first_update(self, execution: Mapping[str, Any], update: Estimate, warm: bool) -> Estimate:
        """Seconds of the first update: cold for the first candidate of a compilation, warm for those that share it."""
        kind = kind_of(execution)
        if kind == "eager" or warm or compilation(execution) in self._compiled:
            prior = self._priors.first_update_seconds(kind)[1]
            guess = Estimate(prior + update.expected, 1.5 * prior + update.upper)
            same = [sample for sample in self._samples if sample.kind == kind and (sample.warm or kind == "eager")]
            learned = _learned([sample.seconds for sample in same], guess)
            return Estimate(learned.expected, max(learned.upper, guess.upper if len(same) < 2 else 0.0))
        self.prepare([execution])
        cold = self._colds[compilation(execution)]
        prior = self._priors.first_update_seconds(kind)[0]
        same = [sample for sample in self._samples if sample.kind == kind and not sample.warm]
        cut = max((sample.seconds for sample in same if sample.compilation is None), default=0.0)
        # One sample may have been lucky: a cache that was warm for it need not be for the next candidate.
        floor = max(1.25 * cut, 1.5 * prior + update.upper if len(same) < 2 else 0.0)
        expected = max(cold.expected + update.expected, cut)
        return Estimate(expected, max(cold.upper + update.upper, 1.1 * expected, floor))

    @functools.cached_property
    def _compile_model(self) -> EffectModel:
        """Of cold first updates, all kinds but eager."""
        seen = [
            Observation(sample.execution, math.log(sample.beside_update), COMPILE_NOISE, origin=origin)
            for origin, samples in self._all_samples
            for sample in samples
            if sample.kind != "eager" and not sample.warm
        ]
        baseline = self.records[0].execution if self.records else None
        return EffectModel(CompilePrior(self._priors), baseline or COMPILED, seen)


def _learned(seconds: Iterable[float | None], prior: Estimate) -> Estimate:
    """The median of what was seen, and a quarter above its worst; `prior` where nothing was."""
    seen = [value for value in seconds if value is not None]
    return Estimate(statistics.median(seen), 1.25 * max(seen)) if seen else prior


def _times(estimate: Estimate, count: int) -> Estimate:
    return Estimate(estimate.expected * count, estimate.upper * count)


def _rest_seconds(record: TrialRecord) -> float | None:
    seconds = record.seconds
    if record.fate != Fate.COMPLETE or seconds.total is None:
        return None
    if record.proof and record.proof.parity:
        return None  # the reference's updates, which only the baseline's proof and verification's take
    return seconds.total - sum(
        part or 0.0 for part in (seconds.start, seconds.compile, seconds.warmup, seconds.windows)
    )


_TELLING = ("update", "micro_batch_size", "cpu_threads", "compile_mode", "sdpa_backend")
"""Settings that an update's seconds are predicted by, for budgets; finer differences are for the search."""


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[int, float, float, int]:
    """How unlike two executions are in what an update costs, the most telling setting first."""
    micro = one["micro_batch_size"] / other["micro_batch_size"]
    threads = one["cpu_threads"] / other["cpu_threads"]
    rest = sum(one[key] != other[key] for key in _TELLING[3:])
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
