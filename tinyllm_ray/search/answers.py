"""What a study says: the next trial, wait, or finished; and where every candidate stands."""

from dataclasses import dataclass, replace
from enum import StrEnum

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.candidate import Candidate
from tinyllm_ray.search.cost import Prediction
from tinyllm_ray.search.rates import rate


@dataclass(frozen=True)
class Trial:
    """Measure this candidate now, and tell its record."""

    candidate: Candidate
    stage: str
    """baseline, control, eager, search, verification or repeat."""
    prediction: Prediction
    protocol: Protocol | None = None
    """The study's where None."""
    device: str | None = None
    """Where it has to run; anywhere where None."""
    round: int | None = None
    """Of a verification."""


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


AGAIN = frozenset({"control", "verification"})
"""Stages that measure a candidate again, under another name."""


def again(candidate: Candidate, candidate_id: str, stage: str = "verification") -> Candidate:
    """The candidate as it is called when verification measures it again, or a device its control."""
    return replace(
        candidate, id=candidate_id, label=f"{candidate.label} {'control' if stage == 'control' else 'again'}"
    )


def finished_again(candidate: Candidate, record: TrialRecord) -> CandidateStatus:
    """Of a candidate that has been measured again."""
    return finished_status(again(candidate, record.candidate, record.purpose), record)


def running_status(trial: Trial) -> CandidateStatus:
    """Of a candidate that is being measured."""
    return CandidateStatus(trial.candidate, State.RUNNING, prediction=trial.prediction)


def finished_status(candidate: Candidate, record: TrialRecord) -> CandidateStatus:
    """Of a candidate that has been measured."""
    if record.fate == Fate.COMPLETE and rate(record) is None:
        reason = f"it reported {record.targets_per_second} targets/s, which cannot be compared"
        return CandidateStatus(candidate, State.FINISHED, Fate.INVALID, reason, record)
    return CandidateStatus(candidate, State.FINISHED, record.fate, record.reason, record)
