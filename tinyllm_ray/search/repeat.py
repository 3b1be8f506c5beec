"""A study of which one candidate is measured again, and what its two figures say beside each other."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tinyllm_ray.figures import told_apart
from tinyllm_ray.measure.need import Bar
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.answers import CandidateStatus, Finished, Trial, Wait, again, running_status
from tinyllm_ray.search.candidate import Candidate
from tinyllm_ray.search.fitting import FittedSpace
from tinyllm_ray.search.noise import record_bounds, spread_of
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.rates import rate
from tinyllm_ray.search.study import Study
from tinyllm_ray.search.verifier import Verifier


class Repeat(Study):
    """The study as its records have it, which asks for one process of one candidate and then for nothing.

    Of a candidate that has a figure the record is a repeat: it tells how far processes differ and replaces nothing, so
    that nobody measures until luck has made a winner. Of one that has none it is the search's own, and counts.
    """

    def __init__(
        self,
        space: FittedSpace,
        records: Iterable[TrialRecord],
        execution_identity: str,
        objective: Objective,
        verifier: Verifier | None = None,
    ) -> None:
        """`records` (oldest first) are the study's, one of them of the execution named."""
        records = list(records)
        super().__init__(space, records=records, objective=objective, verifier=verifier)
        own = [record for record in records if record.execution_identity == execution_identity]
        searched = [record for record in own if record.purpose == "search"]
        self.before = next((one for one in reversed(searched) if one.fate == Fate.COMPLETE), searched[-1])
        """The record that counts so far."""
        self.after: TrialRecord | None = None
        self._known = records
        self._repeats = sum(record.purpose == "repeat" for record in own)
        self._again: Trial | None = None
        self._stand_at_the_end()

    @property
    def is_repeat(self) -> bool:
        """Whether the candidate has a figure already, which goes on to count."""
        return self.before.fate == Fate.COMPLETE

    @property
    def difference(self) -> "Difference | None":
        """Of the two figures; None without both."""
        return None if self.after is None else difference(self.before, self.after, self._known)

    def ask(self, remaining_seconds: float, device: str | None = None) -> Trial | Wait | Finished:
        """The one process, where it is expected to fit the time; it may take the chance, as there is nothing else."""
        if self._again is not None:
            return Wait(f"{self._again.candidate.id} is all there is to measure")
        if self.after is not None:
            return Finished(f"{self.after.candidate} is measured", budget_exhausted=False)
        prediction = self._cost.predict(self.before.execution)
        if prediction.expected_seconds > remaining_seconds:
            need, left = math.ceil(prediction.expected_seconds), max(0, math.floor(remaining_seconds))
            return Finished(f"budget: {self.before.candidate} needs about {need} s and {left} s are left", True)
        self._again = Trial(self._candidate(), self._stage(), prediction, self.before.protocol)
        return self._again

    def bar(self, trial: Trial) -> Bar:
        """None: it is measured to its end, as whoever asked for it wants to see."""
        return Bar()

    def tell(self, record: TrialRecord) -> None:
        """Take the record of the process."""
        trial, self._again, self.after = self._again, None, record
        assert trial is not None, f"{record.candidate} was told but is not running"
        if trial.stage == "repeat":
            self.measured_again.append(record)
        else:
            self._learn(record)
            self._results[record.execution_identity] = record
        self._stand_at_the_end()

    def candidates(self) -> list[CandidateStatus]:
        """The study's, the one that runs among them."""
        statuses = super().candidates()
        if self._again is None:
            return statuses
        running = running_status(self._again)
        others = [status for status in statuses if status.candidate.id != running.candidate.id]
        place = next((index for index, one in enumerate(statuses) if one not in others), len(others))
        return [*others[:place], running, *others[place:]]

    def _stand_at_the_end(self) -> None:
        """Where a study stands that has no time left: its verification's verdict drawn from the records."""
        self.verification = None
        answer = super().ask(0.0)
        assert isinstance(answer, Finished), answer

    def _candidate(self) -> Candidate:
        candidate = self._candidates[self.before.execution_identity]
        return again(candidate, f"{candidate.id}-r{self._repeats + 1}") if self.is_repeat else candidate

    def _stage(self) -> str:
        if self.is_repeat:
            return "repeat"
        return {self._baseline: "baseline", self._eager: "eager"}.get(self.before.execution_identity, "search")


@dataclass(frozen=True)
class Difference:
    """What one execution did in two processes."""

    ratio: float
    """The second's targets a second over the first's."""
    noise: float
    """By what share two processes of one execution may differ (95%), by their windows and the study's repeats."""

    @property
    def within_noise(self) -> bool:
        return abs(math.log(self.ratio)) <= math.log1p(self.noise)

    def __str__(self) -> str:
        slower = self.ratio < 1
        noise = self.noise / (1 + self.noise) if slower else self.noise  # of the first one's speed, as the change is
        change, most = told_apart(".1%", abs(self.ratio - 1), noise)
        how = "within" if self.within_noise else "more than"
        return f"{change} {'slower' if slower else 'faster'}: {how} the noise ({most})"


def difference(before: TrialRecord, after: TrialRecord, records: Iterable[TrialRecord]) -> Difference | None:
    """None where one of the two has no figure; `records` (oldest first, without the second) tell of the noise."""
    one, other = rate(before), rate(after)
    spread = spread_of(records)
    bounds = [record_bounds(record, spread) for record in (before, after)]
    known = [bound for bound in bounds if bound is not None]
    if before.fate != Fate.COMPLETE or after.fate != Fate.COMPLETE or one is None or other is None or len(known) < 2:
        return None
    margin = math.hypot(*(math.log(bound.high / bound.low) / 2 for bound in known))
    return Difference(other / one, math.expm1(margin))
