"""The study: says which candidate to measure next (ask), takes its record (tell), and knows the verdict.

Pure: it has no clock, starts nothing and reads nothing. The same records and the same seconds left give the same
answers, so that a whole study replays in milliseconds and a broken one goes on from its records.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tinyllm_ray.config import identity
from tinyllm_ray.records import Fate, Protocol, TrialRecord
from tinyllm_ray.search.candidate import Candidate, candidate_number, make_candidate
from tinyllm_ray.search.cost import CostModel, Prediction
from tinyllm_ray.search.fitting import FittedSpace
from tinyllm_ray.search.plan import FIXED_STAGES, Stage, staged_plan
from tinyllm_ray.search.verdict import Selection, fastest, rate, select

MEASURED_AGAIN = frozenset({Fate.TIMED_OUT, Fate.LOST})
"""Fates that say nothing about a candidate once the study is resumed: with more time, on a sound node, it may do."""


@dataclass(frozen=True)
class Trial:
    """Measure this candidate now, and tell its record."""

    candidate: Candidate
    stage: str
    prediction: Prediction


@dataclass(frozen=True)
class Wait:
    """Nothing can start before one of the running trials is told."""

    reason: str


@dataclass(frozen=True)
class Finished:
    """Nothing is running and nothing more will start."""

    reason: str
    budget_exhausted: bool
    """Whether candidates were left out because they did not fit the time left."""


class State(StrEnum):
    """Where a candidate stands."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    SKIPPED = "skipped"
    """Ruled out by the results of others."""
    NOT_STARTED = "not_started"
    """Would not have fitted the time left."""


@dataclass(frozen=True)
class CandidateStatus:
    """A candidate, and what the study knows of it."""

    candidate: Candidate
    state: State
    fate: Fate | None = None
    """Of a finished one; a complete record without a usable throughput counts as invalid."""
    reason: str | None = None
    record: TrialRecord | None = None
    prediction: Prediction | None = None
    """Of one that is pending, running or not started."""


class Study:
    """One search over one fitted space; several trials may run at once."""

    def __init__(
        self, space: FittedSpace, protocol: Protocol | None = None, records: Iterable[TrialRecord] = ()
    ) -> None:
        """`protocol` is the space's unless given; `records` (oldest first) are those of the study to go on with."""
        self.space = space
        self.protocol = protocol or space.protocol
        self._candidates: dict[str, Candidate] = {}
        self._results: dict[str, TrialRecord] = {}
        self._running: dict[str, Trial] = {}
        self._unaffordable: dict[str, Prediction] = {}
        self._seconds_left = math.inf
        """At the last ask."""
        self._cost = CostModel(space.device_kind, space.parameters * space.targets_per_update, self.protocol)
        for record in records:
            candidate = make_candidate(candidate_number(record.candidate) or 0, record.execution)
            self._candidates[record.execution_identity] = replace(
                candidate, id=record.candidate, execution_identity=record.execution_identity
            )
            self._learn(record)
            if record.fate not in MEASURED_AGAIN:
                self._results[record.execution_identity] = record

    def ask(self, remaining_seconds: float) -> Trial | Wait | Finished:
        """What to do with `remaining_seconds` left for measuring; a Trial counts as running from here on."""
        self._unaffordable.clear()
        self._seconds_left = remaining_seconds
        baseline = identity(self.space.baseline)
        for index, stage in enumerate(self._stages()):
            for step in stage.steps:
                if step.skip or step.identity in self._results or step.identity in self._running:
                    continue
                prediction = self._cost.predict(step.execution)
                # Without the baseline there is no answer at all, so it may take the chance.
                need = prediction.expected_seconds if step.identity == baseline else prediction.upper_seconds
                if need <= remaining_seconds:
                    trial = Trial(self._candidates[step.identity], stage.name, prediction)
                    self._running[step.identity] = trial
                    return trial
                self._unaffordable[step.identity] = prediction
            if baseline in self._running or baseline in self._unaffordable:
                break  # without it nothing that follows could be compared
            if self._running and index >= FIXED_STAGES - 1:
                break
        if self._running:
            names = ", ".join(trial.candidate.id for trial in self._running.values())
            return Wait(f"the next candidate depends on {names}")
        return self._finished()

    def tell(self, record: TrialRecord) -> None:
        """Take the record of a running trial."""
        trial = self._running.pop(record.execution_identity, None)
        assert trial is not None, f"{record.candidate} ({record.execution_identity}) was told but is not running"
        self._learn(record)
        self._results[record.execution_identity] = record

    @property
    def incumbent(self) -> TrialRecord | None:
        """The fastest complete record so far, noise not considered."""
        return fastest(self._results.values())

    def selection(self) -> Selection | None:
        """The verdict so far; None while nothing is complete."""
        return select(self._results.values(), identity(self.space.baseline))

    def candidates(self) -> list[CandidateStatus]:
        """Every candidate the study knows by now, in the order of their numbers."""
        skips: dict[str, str] = {}
        is_open = False
        for index, stage in enumerate(self._stages()):
            for step in stage.steps:
                if step.skip:
                    skips[step.identity] = step.skip
                elif step.identity not in self._results and step.identity not in self._unaffordable:
                    is_open = True
            if is_open and index >= FIXED_STAGES - 1:
                break
        known = sorted(self._candidates.values(), key=lambda candidate: candidate_number(candidate.id) or 0)
        return [self._status(candidate, skips.get(candidate.execution_identity)) for candidate in known]

    def baseline(self) -> CandidateStatus:
        """The candidate every other is compared with."""
        return self._status_of(self.space.baseline)

    def eager_row(self) -> CandidateStatus:
        """The eager candidate at the baseline's micro-batch, which every report shows; the baseline itself on a CPU."""
        return self._status_of(self.space.settle({**self.space.baseline, "update": "eager"}))

    def _status_of(self, execution: dict[str, Any]) -> CandidateStatus:
        name = identity(execution)
        return next(status for status in self.candidates() if status.candidate.execution_identity == name)

    def _status(self, candidate: Candidate, skip: str | None) -> CandidateStatus:
        name = candidate.execution_identity
        if record := self._results.get(name):
            if record.fate == Fate.COMPLETE and rate(record) is None:
                reason = f"it reported {record.targets_per_second} targets/s, which cannot be compared"
                return CandidateStatus(candidate, State.FINISHED, Fate.INVALID, reason, record)
            return CandidateStatus(candidate, State.FINISHED, record.fate, record.reason, record)
        if trial := self._running.get(name):
            return CandidateStatus(candidate, State.RUNNING, prediction=trial.prediction)
        if skip:
            return CandidateStatus(candidate, State.SKIPPED, reason=skip)
        if prediction := self._unaffordable.get(name):
            reason = f"not started: it needs {self._need(name, prediction)}"
            return CandidateStatus(candidate, State.NOT_STARTED, reason=reason, prediction=prediction)
        prediction = self._cost.predict(candidate.execution)
        if identity(self.space.baseline) in self._unaffordable:
            reason = "not started: the baseline comes first, and did not fit"
            return CandidateStatus(candidate, State.NOT_STARTED, reason=reason, prediction=prediction)
        return CandidateStatus(candidate, State.PENDING, prediction=prediction)

    def _stages(self) -> Iterator[Stage]:
        """The plan as it stands, each execution in it registered as a candidate."""
        for stage in staged_plan(self.space, self._results, self._running):
            for step in stage.steps:
                if step.identity not in self._candidates:
                    self._candidates[step.identity] = make_candidate(self._free_number(), step.execution)
            yield stage

    def _free_number(self) -> int:
        taken = {candidate_number(candidate.id) for candidate in self._candidates.values()}
        return next(number for number in itertools.count(1) if number not in taken)

    def _learn(self, record: TrialRecord) -> None:
        self._cost = replace(self._cost, records=(*self._cost.records, record))

    def _finished(self) -> Finished:
        if not self._unaffordable:
            return Finished("space exhausted", budget_exhausted=False)
        name, cheapest = min(self._unaffordable.items(), key=lambda item: item[1].upper_seconds)
        which = "the baseline" if identity(self.space.baseline) in self._unaffordable else "the next candidate"
        return Finished(f"budget: {which} needs {self._need(name, cheapest)}", budget_exhausted=True)

    def _need(self, name: str, prediction: Prediction) -> str:
        left = max(0, math.floor(self._seconds_left))
        if name == identity(self.space.baseline):
            return f"about {math.ceil(prediction.expected_seconds)} s and {left} s are left"
        return f"up to {math.ceil(prediction.upper_seconds)} s and {left} s are left"
