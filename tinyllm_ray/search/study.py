"""The study: says which candidate to measure next (ask), takes its record (tell), and knows the verdict.

The baseline first, the eager row as a cheap control, then what is expected to save most per second of measuring, while
that pays; last, where a verifier is given, finalists and baseline again. Pure: the same records and seconds left give
the same answers, so that a broken study goes on.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tinyllm_ray.config import identity
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.account import Account, account
from tinyllm_ray.search.answers import (
    CandidateStatus,
    Finished,
    State,
    Trial,
    Wait,
    again,
    finished_status,
    running_status,
)
from tinyllm_ray.search.candidate import Candidate, Candidates, make_candidate
from tinyllm_ray.search.cost import CostModel, Prediction
from tinyllm_ray.search.fitting import FittedSpace
from tinyllm_ray.search.objective import Objective, Winner, winners
from tinyllm_ray.search.outlook import Outlook
from tinyllm_ray.search.pool import Pool
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.rates import fastest, ranked
from tinyllm_ray.search.ruled_out import hopeless, out_of_memory
from tinyllm_ray.search.verdict import THROUGHPUT, Selection, select
from tinyllm_ray.search.verified import Verified
from tinyllm_ray.search.verifier import Verification, Verifier, reserved_seconds

MEASURED_AGAIN = frozenset({Fate.TIMED_OUT, Fate.LOST})
"""Fates that say nothing about a candidate once the study is resumed: with more time, on a sound node, it may do."""

_FEW = 3
"""Of the best: measured executions around which a large space is searched, and candidates shown that did not fit."""


class Study:
    """One search over one fitted space; several trials may run at once."""

    def __init__(
        self,
        space: FittedSpace,
        protocol: Protocol | None = None,
        records: Iterable[TrialRecord] = (),
        objective: Objective = THROUGHPUT,
        verifier: Verifier | None = None,
        priors: Priors | None = None,
    ) -> None:
        """`records` (oldest first) are those of the study to go on with; `protocol` is the space's unless given."""
        self.space = space
        self.protocol = protocol or space.protocol
        self.objective = objective
        self.verifier = verifier
        self._priors = priors or Priors(space.device_kind)
        self._pool = Pool(space)
        self._candidates = Candidates()
        self._results: dict[str, TrialRecord] = {}
        self._lapsed: dict[str, TrialRecord] = {}  # of earlier sessions, which settle nothing
        self.measured_again: list[TrialRecord] = []
        """Verification's records, oldest first; the search learns nothing from them, so it stays over once it is."""
        self.verification: Verification | None = None  # that has begun
        self._running: dict[str, Trial] = {}
        self._unaffordable: dict[str, tuple[dict[str, Any], Prediction]] = {}  # by identity, at the last ask
        self._selected: tuple[Selection | None] | None = None  # the verdict, asked for since the last record
        self._seconds_left = math.inf
        work = space.parameters * space.targets_per_update
        self._cost = CostModel(space.device_kind, work, self.protocol, (), self._priors)
        eager = space.settle({**space.baseline, "update": "eager"})
        self._baseline, self._eager = identity(space.baseline), identity(eager)
        for record in records:
            self._resume(record)
        for execution in (space.baseline, eager):
            self._candidates.register(execution)

    def ask(self, remaining_seconds: float) -> Trial | Wait | Finished:
        """What to do with `remaining_seconds` left; a Trial counts as running from here on."""
        self._unaffordable.clear()
        self._seconds_left = remaining_seconds
        if self._baseline in self._running:
            return Wait(f"{self._candidates[self._baseline].id} comes first: every other is compared with it")
        answer = self._ask_first() or self._ask_search()
        if isinstance(answer, Finished) and not self._running:
            return self._ask_verification(answer)
        if isinstance(answer, Finished):
            names = ", ".join(trial.candidate.id for trial in self._running.values())
            return Wait(f"what is next depends on {names}")
        return answer

    def tell(self, record: TrialRecord) -> None:
        """Take the record of a running trial."""
        trial = self._running.pop(record.execution_identity, None)
        assert trial is not None, f"{record.candidate} ({record.execution_identity}) was told but is not running"
        if trial.stage == "verification":
            assert self.verification is not None
            self.measured_again.append(record)
            self.verification.tell(record)
        else:
            self._learn(record)
            self._results[record.execution_identity] = record

    def incumbent(self) -> TrialRecord | None:
        """The fastest complete record so far, noise not considered."""
        return fastest(self._results.values())

    def selection(self) -> Selection | None:
        """The verdict so far: verification's where it has one, else the search's; None while nothing is complete."""
        verified = self.verified()
        return self._choice() if verified is None else Selection(verified.selected, verified.ties, verified.reason)

    def verified(self) -> Verified | None:
        """What pairs of fresh processes say, which the search's own figures cannot; None while they say nothing."""
        return self.verification.outcome() if self.verification is not None else None

    def _choice(self) -> Selection | None:
        """The search's."""
        if self._selected is None:
            outlook = Outlook(self.space, self.objective, self._cost, self._priors)
            known, starts = self._results.values(), self._cost.starts
            self._selected = (select(known, self._baseline, self.objective, starts, outlook.expected_rate),)
        return self._selected[0]

    def winners(self) -> list[Winner]:
        """For 10 M to 10 B targets the record whose planned trainings take least."""
        return winners(self._results.values(), self._cost.starts, self.objective.runs)

    def account(self) -> Account | None:
        """What was spent and what it saves; None before there is a verdict, and where the objective has no seconds."""
        selection, baseline = self.selection(), self._results.get(self._baseline)
        if selection is None or baseline is None:
            return None
        return account(
            [*self._cost.records, *self.measured_again], baseline, selection.record, self.objective, self._cost.starts
        )

    def candidates(self) -> list[CandidateStatus]:
        """Every candidate the study knows by now, in the order of their numbers; last, what did not fit the budget."""
        statuses = [self._status(candidate) for candidate in self._candidates.in_order()]
        for record in self.measured_again:
            candidate = again(self._candidates[record.execution_identity], record.candidate)
            statuses.append(finished_status(candidate, record))
        statuses += [running_status(trial) for trial in self._running.values() if trial.stage == "verification"]
        number = self._candidates.free_number()
        for name, (execution, prediction) in self._unaffordable.items():
            if name not in self._candidates:
                reason = f"not started: it needs {self._need(name, prediction)}"
                candidate = make_candidate(number, execution)
                statuses.append(CandidateStatus(candidate, State.NOT_STARTED, reason=reason, prediction=prediction))
                number += 1
        return statuses

    def baseline(self) -> CandidateStatus:
        """The candidate every other is compared with."""
        return self._status(self._candidates[self._baseline])

    def eager_row(self) -> CandidateStatus:
        """The eager candidate at the baseline's micro-batch, which every report shows; the baseline itself on a CPU."""
        return self._status(self._candidates[self._eager])

    # What comes next

    def _ask_first(self) -> Trial | Finished | None:
        """The baseline, and the eager row; None when they are settled, or the eager row does not fit."""
        if self._baseline not in self._results:
            # Without the baseline there is no answer at all, so it may take the chance.
            prediction = self._cost.predict(self.space.baseline)
            if prediction.expected_seconds <= self._seconds_left:
                return self._start(self.space.baseline, "baseline", prediction)
            self._unaffordable[self._baseline] = self.space.baseline, prediction
            need = self._need(self._baseline, prediction)
            return Finished(f"budget: the baseline needs {need}", budget_exhausted=True)
        if self._eager not in self._results and self._eager not in self._running:
            execution = self._candidates[self._eager].execution
            if out_of_memory(execution, self._results.values()) is None:
                prediction = self._cost.predict(execution)
                if self._affordable(execution, prediction):
                    return self._start(execution, "eager", prediction)
                self._unaffordable[self._eager] = execution, prediction
        return None

    def _ask_search(self) -> Trial | Finished:
        """What promises most for its seconds among all that fits and pays."""
        if hopeless(self._results.values()):
            return Finished(f"none of {len(self._results)} candidates ran", budget_exhausted=False)
        running = [trial.candidate.execution for trial in self._running.values()]
        outlook = Outlook(self.space, self.objective, self._cost, self._priors, running)
        open_ = self._open(outlook)
        if not open_:
            return self._finished("space exhausted")
        found = outlook.prospects(open_, self.verifier)
        paying = [prospect for prospect in found if prospect.pays(self.objective)]
        for prospect in paying:
            if self._affordable(prospect.execution, prospect.prediction):
                return self._start(prospect.execution, "search", prospect.prediction)
        for prospect in paying[:_FEW]:
            self._unaffordable[prospect.identity] = prospect.execution, prospect.prediction
        if self.objective.kind == "throughput":
            return self._finished("nothing left is expected to be faster")
        return self._finished("nothing left is expected to save more than it takes to measure")

    def _ask_verification(self, end: Finished) -> Trial | Finished:
        """Finalists and baseline again, one at a time, after the search's `end`."""
        selection, baseline = self._choice(), self._results.get(self._baseline)
        if self.verifier is None or selection is None or baseline is None:
            return end
        if self.verification is None:
            self.verification = self.verifier.begin(selection, baseline, self.measured_again, self._cost)
        asked = self.verification.ask(self._seconds_left)
        if isinstance(asked, Finished):
            return replace(end, reason=f"{end.reason}; {asked.reason}") if asked.budget_exhausted else end
        name = asked.record.execution_identity
        cost = replace(self._cost, protocol=asked.protocol or self.protocol)
        prediction = cost.predict(asked.record.execution, warm=True)
        candidate = again(self._candidates[name], asked.name)
        self._running[name] = Trial(candidate, "verification", prediction, asked.protocol, asked.device, asked.round)
        return self._running[name]

    def _open(self, outlook: Outlook) -> dict[str, dict[str, Any]]:
        """Executions that may be measured, by identity."""
        anchors = [record.execution for record in ranked(self._results.values())[:_FEW]]
        reach = self._pool.around([*anchors, self.space.baseline], outlook.expected_rates, outlook.host_bound)
        failed = [record for record in self._results.values() if record.fate == Fate.OUT_OF_MEMORY]
        return {
            name: execution
            for name, execution in reach.items()
            if name not in self._results and name not in self._running and out_of_memory(execution, failed) is None
        }

    def _affordable(self, execution: dict[str, Any], prediction: Prediction) -> bool:
        return prediction.upper_seconds + self._reserve(execution) <= self._seconds_left

    def _reserve(self, execution: dict[str, Any]) -> float:
        """Seconds to keep for verification, should this execution or the present choice win."""
        selection = self._choice()
        finalists = [execution, *([selection.record.execution] if selection else [])]
        return reserved_seconds(self.verifier, self._cost, finalists, self.space.baseline)

    def _start(self, execution: dict[str, Any], stage: str, prediction: Prediction) -> Trial:
        candidate = self._candidates.register(execution)
        trial = Trial(candidate, stage, prediction)
        self._running[candidate.execution_identity] = trial
        return trial

    # What is known

    def _resume(self, record: TrialRecord) -> None:
        name = record.execution_identity
        if record.purpose == "verification":
            self.measured_again.append(record)
            return
        self._candidates.keep(record.candidate, record.execution, name)
        self._learn(record)
        (self._lapsed if record.fate in MEASURED_AGAIN else self._results)[name] = record

    def _learn(self, record: TrialRecord) -> None:
        self._cost = replace(self._cost, records=(*self._cost.records, record))
        self._selected = self.verification = None

    def _status(self, candidate: Candidate) -> CandidateStatus:
        name = candidate.execution_identity
        if record := self._results.get(name):
            return finished_status(candidate, record)
        if trial := self._running.get(name):
            return running_status(trial)
        if record := self._lapsed.get(name):
            return finished_status(candidate, record)
        prediction = self._cost.predict(candidate.execution)
        if failed := out_of_memory(candidate.execution, self._results.values()):
            return CandidateStatus(candidate, State.SKIPPED, reason=f"skipped: {failed.candidate} ran out of memory")
        if name in self._unaffordable:
            reason = f"not started: it needs {self._need(name, prediction)}"
            return CandidateStatus(candidate, State.NOT_STARTED, reason=reason, prediction=prediction)
        if self._baseline in self._unaffordable:
            reason = "not started: the baseline comes first, and did not fit"
            return CandidateStatus(candidate, State.NOT_STARTED, reason=reason, prediction=prediction)
        return CandidateStatus(candidate, State.PENDING, prediction=prediction)

    def _finished(self, why: str) -> Finished:
        if self._unaffordable:
            name, (_, least) = min(self._unaffordable.items(), key=lambda item: item[1][1].upper_seconds)
            why = f"budget: the next candidate needs {self._need(name, least)}"
        spent = self.account()
        return Finished(f"{why}; {spent}" if spent else why, budget_exhausted=bool(self._unaffordable))

    def _need(self, name: str, prediction: Prediction) -> str:
        left = max(0, math.floor(self._seconds_left))
        if name == self._baseline:
            return f"about {math.ceil(prediction.expected_seconds)} s and {left} s are left"
        reserve = math.ceil(self._reserve(self.space.baseline))
        kept = f", {reserve} s of them for verification" if reserve else ""
        return f"up to {math.ceil(prediction.upper_seconds)} s and {left} s are left{kept}"
