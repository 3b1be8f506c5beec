"""Where each candidate of a study stands: finished, running, or why it has not been started."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.admission import Admission
from tinyllm_ray.search.answers import (
    AGAIN,
    CandidateStatus,
    State,
    Trial,
    finished_again,
    finished_status,
    running_status,
)
from tinyllm_ray.search.candidate import Candidate, Candidates, make_candidate
from tinyllm_ray.search.cost import Prediction
from tinyllm_ray.search.ruled_out import out_of_memory


@dataclass(frozen=True)
class Standing:
    """What decides it, by execution identity."""

    results: Mapping[str, TrialRecord]
    lapsed: Mapping[str, TrialRecord]
    """Records that settle nothing, shown until their candidates are measured again."""
    running: Mapping[str, Trial]
    """Trials of the search."""
    admission: Admission
    baseline: str
    predict: Callable[[Mapping[str, Any]], Prediction]

    def of_all(
        self, candidates: Candidates, again: Iterable[TrialRecord], running: Iterable[Trial]
    ) -> list[CandidateStatus]:
        """Of all in the order of their numbers, of `again`, what was measured once more, and of what did not fit."""
        return [
            *(self.of(candidate) for candidate in candidates.in_order()),
            *(finished_again(candidates[record.execution_identity], record) for record in again),
            *(running_status(trial) for trial in running if trial.stage in AGAIN),
            *self.left_out(candidates),
        ]

    def of(self, candidate: Candidate) -> CandidateStatus:
        """Of a candidate that has a number."""
        name = candidate.execution_identity
        if record := self.results.get(name):
            return finished_status(candidate, record)
        if trial := self.running.get(name):
            return running_status(trial)
        if record := self.lapsed.get(name):
            return finished_status(candidate, record)
        prediction = self.predict(candidate.execution)
        if failed := out_of_memory(candidate.execution, self.results.values()):
            return CandidateStatus(candidate, State.SKIPPED, reason=f"{failed.candidate} ran out of memory")
        if name in self.admission.left_out:
            return self.not_started(candidate, prediction)
        if self.baseline in self.admission.left_out:
            reason = "the baseline comes first, and did not fit"
            return CandidateStatus(candidate, State.NOT_STARTED, reason=reason, prediction=prediction)
        return CandidateStatus(candidate, State.PENDING, prediction=prediction)

    def not_started(self, candidate: Candidate, prediction: Prediction) -> CandidateStatus:
        """Of one that does not fit the time left."""
        reason = f"it needs {self.admission.need(candidate.execution, prediction)}"
        return CandidateStatus(candidate, State.NOT_STARTED, reason=reason, prediction=prediction)

    def left_out(self, candidates: Candidates) -> Iterator[CandidateStatus]:
        """Of what does not fit and has no number yet."""
        number = candidates.free_number()
        for name, (execution, prediction) in self.admission.left_out.items():
            if name not in candidates:
                yield self.not_started(make_candidate(number, execution), prediction)
                number += 1
