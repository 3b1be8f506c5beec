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
from tinyllm_ray.search.likeness import TELLING, Estimate, distance, scaled
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.ruled_out import RAN


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

COMPILE_NOISE = 0.1
"""Standard deviation of a compilation's seconds, as a logarithm: 18.8 to 22.6 s in one study on an H200."""

CERTAIN = 2.0
"""Standard deviations from the expected to the upper figure."""

COMPILED = ExecutionConfig(update="compiled", micro_batch_size=32, cpu_threads=8).model_dump(mode="json")
"""What effects on compilations count from before anything is recorded."""

USUAL_WINDOWS, USUAL_COUNTS_AS = 8, 4
"""Windows by need that a candidate takes which is as close to the best as windows can tell, and records that this is
worth beside those of the study: what cannot win takes one to three."""

USUAL_WARMUP = 4
"""Updates of an adaptive warm-up after the first: three that are steady, and one that may not be."""

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
    """Unless a prediction names another."""
    records: tuple[TrialRecord, ...] = ()
    priors: Priors | None = None
    """All machines' unless given."""

    def predict(
        self, execution: Mapping[str, Any], *, warm: bool = False, protocol: Protocol | None = None
    ) -> Prediction:
        """Seconds of a candidate with these settings, all defaults settled; `warm`: its compilation is cached."""
        update, protocol = self._update(execution), protocol or self.protocol
        most = protocol.warmup_updates - 1
        usual = most if protocol.version == 2 else min(most, USUAL_WARMUP)
        return Prediction(
            start=self._start,
            compile=self._first_update(execution, update, warm),
            warmup=Estimate(usual * update.expected, most * update.upper),
            windows=Estimate(self._windows(protocol, update.expected), protocol.longest_seconds(update.upper)),
            rest=self._rest,
        )

    def _windows(self, protocol: Protocol, update: float) -> float:
        """Expected seconds of windows: as many as this protocol took so far on average, where that is few, as usual."""
        longest = protocol.longest_seconds(update)
        if protocol.version == 2:
            return longest
        if protocol not in self._counts:
            ran = [len(record.windows) for record in self.records if record.fate in RAN and record.protocol == protocol]
            self._counts[protocol] = statistics.fmean([*ran, *[USUAL_WINDOWS] * USUAL_COUNTS_AS])
        return min(longest, protocol.seconds_of(self._counts[protocol], update))

    @functools.cached_property
    def _counts(self) -> dict[Protocol, float]:
        return {}

    def _update(self, execution: Mapping[str, Any]) -> Estimate:
        """Seconds an update: from the most similar execution that was timed."""
        key = tuple(execution[name] for name in TELLING)
        if key not in self._updates:
            self._updates[key] = self._fresh_update(execution)
        return self._updates[key]

    def _fresh_update(self, execution: Mapping[str, Any]) -> Estimate:
        timed = [(record, seconds) for record in self.records if (seconds := record.seconds_per_update)]
        if not timed:
            expected = self.work_per_update / self._priors.work_per_second(execution["update"])
            return Estimate(expected, expected * (UNSEEN_SIZE if self._priors.earlier else UNSEEN_MACHINE))
        distances = [distance(execution, record.execution) for record, _ in timed]
        nearest = min(distances)
        # Of micro-batches as unlike the asked one some are larger and some smaller: each says what it says.
        similar = [
            Estimate(seconds * scale.expected, seconds * scale.upper)
            for (record, seconds), distance in zip(timed, distances, strict=True)
            if distance == nearest
            for scale in [scaled(record.execution, execution, self.device_kind)]
        ]
        expected, upper = (statistics.median(one[part] for one in similar) for part in (0, 1))
        margin = SAME_MARGIN if nearest[:3] == (0, 0, 0) else OTHER_MARGIN
        return Estimate(expected, upper * margin)

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
        key = compilation(execution), update, warm
        if key not in self._first_updates:
            self._first_updates[key] = self._fresh_first_update(execution, update, warm)
        return self._first_updates[key]

    @functools.cached_property
    def _first_updates(self) -> dict[tuple[Any, ...], Estimate]:
        return {}

    def _fresh_first_update(self, execution: Mapping[str, Any], update: Estimate, warm: bool) -> Estimate:
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


def _rest_seconds(record: TrialRecord) -> float | None:
    seconds = record.seconds
    if record.fate != Fate.COMPLETE or seconds.total is None:
        return None
    if record.proof and record.proof.parity:
        return None  # the reference's updates, which only the baseline's proof and verification's take
    return seconds.total - sum(
        part or 0.0 for part in (seconds.start, seconds.compile, seconds.warmup, seconds.windows)
    )
