"""The phase after the search: what a study needs of whoever measures finalists and baseline again, and a plain one."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Contract

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.answers import Finished
from tinyllm_ray.search.cost import CostModel
from tinyllm_ray.search.verdict import Selection
from tinyllm_ray.search.verified import Verified


@dataclass(frozen=True)
class Again:
    """A fresh process of an execution that the search has measured; nothing else runs beside it."""

    record: TrialRecord
    """The search's."""
    name: str
    """For the new record and its log, unique within the study; begins like the candidate's id."""
    protocol: Protocol | None = None
    """The study's where None."""
    device: str | None = None
    """Where it has to run; anywhere where None."""
    round: int | None = None
    """Which of the rounds it belongs to, where there are rounds."""


class Verification(Contract):
    """One verification, ask/tell like the study."""

    def ask(self, remaining_seconds: float) -> Again | Finished:
        """The process to start next, or that it is over."""
        ...

    def tell(self, record: TrialRecord) -> None:
        """Take the record of the process asked for last."""
        ...

    def outcome(self) -> Verified | None:
        """The verdict so far; None while there is none."""
        ...


class Verifier(Contract):
    """How a study verifies. Pure, like the study that asks it."""

    def seconds(self, cost: CostModel, one: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
        """Expected seconds of verifying one finalist, all compilations cached."""
        ...

    def begin(
        self, selection: Selection, baseline: TrialRecord, earlier: Sequence[TrialRecord], cost: CostModel
    ) -> Verification:
        """Verify the search's choice; `earlier` are the records that verification has left already, oldest first."""
        ...


MARGIN = 1.2
"""Seconds kept for verification over those expected of it."""


def reserved_seconds(
    verifier: Verifier | None, cost: CostModel, finalists: Iterable[Mapping[str, Any]], baseline: Mapping[str, Any]
) -> float:
    """Seconds to keep for verification, whichever of the finalists it will be; 0 where nothing is verified."""
    if verifier is None:
        return 0.0
    return MARGIN * max(verifier.seconds(cost, finalist, baseline) for finalist in finalists)


@dataclass(frozen=True)
class InterleavedPairs:
    """A Verifier: the choice and the baseline, as often as `pairs` says, the order turned round from pair to pair."""

    pairs: int = 3

    def seconds(self, cost: CostModel, one: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
        return self.pairs * sum(cost.predict(execution, warm=True).expected_seconds for execution in (one, baseline))

    def begin(
        self, selection: Selection, baseline: TrialRecord, earlier: Sequence[TrialRecord], cost: CostModel
    ) -> Verification:
        return _Pairs(self.pairs, selection.record, baseline, list(earlier), cost)


@dataclass
class _Pairs:
    pairs: int
    selected: TrialRecord
    baseline: TrialRecord
    records: list[TrialRecord]
    cost: CostModel

    def ask(self, remaining_seconds: float) -> Again | Finished:
        record = self._next()
        if record is None:
            return Finished("all pairs are measured", budget_exhausted=False)
        needed = self.cost.predict(record.execution, warm=True).upper_seconds
        if needed > remaining_seconds:
            return Finished(f"verifying needs up to {needed:.0f} s", budget_exhausted=True)
        return Again(record, f"{record.candidate}-v{len(self.records) + 1}")

    def tell(self, record: TrialRecord) -> None:
        self.records.append(record)

    def outcome(self) -> Verified | None:
        return None  # the search's choice stands

    def _next(self) -> TrialRecord | None:
        if self.selected.execution_identity == self.baseline.execution_identity:
            return None
        done = Counter(record.execution_identity for record in self.records)
        for pair in range(self.pairs):
            both = (self.selected, self.baseline)
            for record in both if pair % 2 == 0 else both[::-1]:
                if not done[record.execution_identity]:
                    return record
                done[record.execution_identity] -= 1
        return None
