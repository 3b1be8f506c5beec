"""Whether a decision still holds: winner and baseline again, in interleaved pairs of fresh processes.

The first pair is measured with short windows, since nothing is known of this machine yet; the further ones are
`verification`'s, which takes longer windows where the noise asks for them and the time allows it.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.answers import CandidateStatus, Finished, Trial, Wait, again, finished_status, running_status
from tinyllm_ray.search.candidate import Candidate
from tinyllm_ray.search.cost import Prediction
from tinyllm_ray.search.fitting import FittedSpace
from tinyllm_ray.search.noise import Spread
from tinyllm_ray.search.paired import Rounds
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD, LEAST_PAIRS, Pair, Verdict, judge, unsteady
from tinyllm_ray.search.rates import rate
from tinyllm_ray.search.study import Study
from tinyllm_ray.search.verification import MOST_FAILURES, Verification

Claim = Literal["faster", "tie", "baseline"]
"""What was decided: the selected execution is faster than the baseline; it is one of a tie with it, and preferred for
its start or its memory; the baseline is selected, as no other was shown to be faster."""

Outcome = Literal["holds", "no longer holds", "could not be told"]

_AGAINST = frozenset({Fate.FAILED, Fate.INVALID, Fate.OUT_OF_MEMORY})
"""Fates that say of an execution that it cannot be used here; a lost or cut process says nothing."""


@dataclass(frozen=True)
class Question:
    """The decision that is put to the test."""

    baseline: Candidate
    other: Candidate
    """The selected one; where that is the baseline, the one that came closest to it."""
    claim: Claim

    @property
    def selected(self) -> Candidate:
        return self.baseline if self.claim == "baseline" else self.other


@dataclass(frozen=True)
class Answer:
    """What the pairs say of the decision."""

    outcome: Outcome
    reason: str
    """On one line, for people."""
    verdict: Verdict | None = None
    """Of the question's other execution over the baseline; None without a pair."""


class Validation(Study):
    """Asks for pairs of processes of two executions, and draws the answer from their records."""

    def __init__(self, space: FittedSpace, question: Question, spread: Spread = CAUTIOUS_SPREAD) -> None:
        """`space` has the baseline, and the protocol whose data mode and warm-up are taken; `spread` is what is known
        of this device."""
        super().__init__(space, quick_protocol(space.protocol))
        self.question = question
        self._both = {one.execution_identity: one for one in (question.baseline, question.other)}
        self._spread = spread
        self._asked: Trial | None = None

    def ask(self, remaining_seconds: float, device: str | None = None) -> Trial | Wait | Finished:
        """The next process; nothing else runs beside it."""
        if self._asked is not None:
            return Wait(f"one process at a time: {self._asked.candidate.id} runs")
        if self.verification is None:
            for name in self._both:
                if self._failures(name) >= MOST_FAILURES:
                    return Finished(f"{self._both[name].id} could not be measured", budget_exhausted=False)
                if name not in self._complete():
                    return self._ask_first_pair(name, remaining_seconds)
            self.verification = self._pairs()
        if (verdict := self._verdict()) is not None and verdict.decided:
            return Finished("the pairs tell", budget_exhausted=False)
        asked = self.verification.ask(remaining_seconds)
        if isinstance(asked, Finished):
            return asked
        prediction = self._predict(asked.record.execution, asked.protocol or self.protocol)
        candidate = again(self._both[asked.record.execution_identity], asked.name)
        self._asked = Trial(candidate, "verification", prediction, asked.protocol, asked.device, asked.round)
        return self._asked

    def tell(self, record: TrialRecord) -> None:
        """Take the record of the process asked for last."""
        assert self._asked is not None, f"{record.candidate} was told but is not running"
        self._asked = None
        self.measured_again.append(record)
        self._cost = replace(self._cost, records=(*self._cost.records, record))
        if record.fate == Fate.COMPLETE:
            self._results.setdefault(record.execution_identity, record)
        if self.verification is not None:
            self.verification.tell(record)

    def candidates(self) -> list[CandidateStatus]:
        """The processes so far."""
        known = [(self._both[one.execution_identity], one) for one in self.measured_again]
        found = [finished_status(again(candidate, one.candidate), one) for candidate, one in known]
        return [*found, running_status(self._asked)] if self._asked else found

    def answer(self) -> Answer:
        """What is known so far."""
        question = self.question
        if (why := self._cannot_run(question.selected)) is not None:
            return Answer("no longer holds", f"{question.selected.id} cannot be used here: {why}")
        if question.claim == "baseline" and (why := self._cannot_run(question.other)) is not None:
            return Answer("holds", f"{question.other.id}, which came closest to it, cannot be used here: {why}")
        verdict = self._verdict()
        if verdict is None:
            bad = next((one for one in reversed(self.measured_again) if one.fate != Fate.COMPLETE), None)
            why = f"{bad.candidate} is {bad.fate.value}: {bad.reason}" if bad else "no pair was measured to its end"
            return Answer("could not be told", why)
        pairs = f"{verdict.pairs} pair{'s' * (verdict.pairs > 1)} of processes"
        words = f"{question.other.id} is {verdict.ratio:.3f}x the baseline ({verdict.low:.3f} to {verdict.high:.3f} "
        words += f"with 90%, {pairs})"
        if verdict.pairs < LEAST_PAIRS:
            words += f", and it takes {LEAST_PAIRS} to tell"
        elif verdict.outcome == "open":
            words += ", a difference inside the noise"
        words += unsteady(self._measured_pairs(), question.other.id)
        return Answer(outcome_of(verdict, question.claim), words, verdict)

    def _ask_first_pair(self, name: str, remaining_seconds: float) -> Trial | Finished:
        """A process of the first pair; it may take the chance, as without it there is no answer."""
        candidate = self._both[name]
        prediction = self._predict(candidate.execution, self.protocol)
        if prediction.expected_seconds > remaining_seconds:
            need, left = math.ceil(prediction.expected_seconds), max(0, math.floor(remaining_seconds))
            return Finished(f"budget: {candidate.id} needs about {need} s and {left} s are left", True)
        named = again(candidate, f"{candidate.id}-v1{'-again' * bool(self._failures(name))}")
        self._asked = Trial(named, "verification", prediction, self.protocol, round=0)
        return self._asked

    def _pairs(self) -> Rounds:
        """What goes on from the first pair."""
        # Verification knows an execution by the search's record of it, and a round by its own.
        known = [
            one.model_copy(update={"purpose": "search", "round": None, "candidate": self._both[name].id})
            for name, one in self._complete().items()
        ]
        baseline, other = self._both
        records = [*known, *self.measured_again]
        return Rounds(Verification(records, baseline, [other], self._process_seconds, self.protocol, self._spread))

    def _process_seconds(self, execution: Mapping[str, Any], protocol: Protocol) -> float:
        """What is expected of a process, where a study counts with the most it may take: a pair that is cut by the
        budget's end costs nothing here, and one that is not begun leaves no answer."""
        prediction = self._predict(execution, protocol, warm=True)
        # The cost model leaves out what parity takes, which the first process of each has measured.
        rest = statistics.median(map(_rest_seconds, self._complete().values()))
        return prediction.expected_seconds - prediction.rest.expected + rest

    def _predict(self, execution: Mapping[str, Any], protocol: Protocol, warm: bool = False) -> Prediction:
        return self._cost.predict(execution, warm=warm, protocol=protocol)

    def _verdict(self) -> Verdict | None:
        pairs = self._measured_pairs()
        return judge(pairs, self._spread) if pairs else None

    def _measured_pairs(self) -> list[Pair]:
        baseline, other = self._both
        return self.verification.verification.pairs(other, baseline) if isinstance(self.verification, Rounds) else []

    def _complete(self) -> dict[str, TrialRecord]:
        """The first complete record of each of the two, the baseline first."""
        usable = [one for one in self.measured_again if one.fate == Fate.COMPLETE and rate(one) is not None]
        first = {one.execution_identity: one for one in reversed(usable)}
        return {name: first[name] for name in self._both if name in first}

    def _failures(self, name: str) -> int:
        return sum(one.execution_identity == name and one.fate != Fate.COMPLETE for one in self.measured_again)

    def _cannot_run(self, candidate: Candidate) -> str | None:
        """Why, where so many of its processes failed as verification takes for an answer."""
        own = [one for one in self.measured_again if one.execution_identity == candidate.execution_identity]
        bad = [one for one in own if one.fate in _AGAINST]
        return f"{bad[-1].fate.value}: {bad[-1].reason}" if len(bad) >= MOST_FAILURES else None


def outcome_of(verdict: Verdict, claim: Claim) -> Outcome:
    """What a verdict on the question's other execution over the baseline says of the decision.

    As a study decides: what is not shown to differ is a tie, so a tie is upheld by what is open after enough pairs, but
    nothing is called faster that is not shown to be.
    """
    if claim == "faster":
        answers: dict[str, Outcome] = {"faster": "holds", "open": "could not be told"}
        return answers.get(verdict.outcome, "no longer holds")
    if verdict.outcome == ("slower" if claim == "tie" else "faster"):
        return "no longer holds"
    return "holds" if verdict.pairs >= LEAST_PAIRS else "could not be told"


def _rest_seconds(record: TrialRecord) -> float:
    """What a process took beside its updates and its start: the proof, and its end."""
    seconds = record.seconds
    known = (seconds.start, seconds.compile, seconds.warmup, seconds.windows)
    return max(0.0, (seconds.total or 0.0) - sum(part or 0.0 for part in known))


def quick_protocol(protocol: Protocol) -> Protocol:
    """Three or four windows of half a second, as a minute has to do for six processes."""
    return Protocol(
        version="adaptive",
        data_mode=protocol.data_mode,
        warmup_updates=protocol.warmup_updates,
        windows=3,
        most_windows=4,
    )
