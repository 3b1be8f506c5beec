"""The study: says which candidate to measure next (ask), takes its record (tell), and knows the verdict.

The baseline first, on every device, the eager row beside it, then what is expected to save most per second of
measuring, while that pays; last, where a verifier is given, finalists and baseline again. Pure: the same records and
seconds left give the same answers, so that a broken study goes on.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tinyllm_ray.config import identity
from tinyllm_ray.measure.need import Bar
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.account import Account
from tinyllm_ray.search.admission import Admission
from tinyllm_ray.search.answers import AGAIN, CandidateStatus, Finished, Trial, Wait, again
from tinyllm_ray.search.candidate import Candidates
from tinyllm_ray.search.comparison import Comparison
from tinyllm_ray.search.controls import Controls
from tinyllm_ray.search.cost import CostModel, Prediction
from tinyllm_ray.search.fitting import FittedSpace
from tinyllm_ray.search.objective import Objective, Winner
from tinyllm_ray.search.outlook import Outlook
from tinyllm_ray.search.pool import Pool
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.rates import ranked
from tinyllm_ray.search.ruled_out import RuledOut, hopeless, out_of_memory
from tinyllm_ray.search.settled import MEASURED_AGAIN, keep, settles
from tinyllm_ray.search.standing import Standing
from tinyllm_ray.search.verdict import THROUGHPUT, Selection
from tinyllm_ray.search.verified import Verified
from tinyllm_ray.search.verifier import Verification, Verifier, reserved_seconds

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
        devices: int = 1,
    ) -> None:
        """`records` (oldest first) are those of the study to go on with; `protocol` is the space's unless given."""
        self.space = space = space if protocol is None else replace(space, protocol=protocol)
        self.protocol = space.protocol
        self.objective = objective
        self.verifier = verifier
        self._priors = priors or Priors(space.device_kind)
        self._pool = Pool(space)
        self._candidates = Candidates()
        self._results: dict[str, TrialRecord] = {}
        self._lapsed: dict[str, TrialRecord] = {}  # records that settle nothing: measured again
        self.measured_again: list[TrialRecord] = []
        """Verification's records and repeats, oldest first; the search learns nothing from them, so it stays over."""
        self.verification: Verification | None = None  # that has begun
        self._running: dict[str, Trial] = {}
        """By candidate id."""
        self._admission = Admission(math.inf, self._reserve, space.baseline)
        """At the last ask."""
        self._selected: tuple[Selection | None] | None = None  # the verdict, asked for since the last record
        work = space.parameters * space.targets_per_update
        self._cost = CostModel(space.device_kind, work, self.protocol, (), self._priors)
        eager = space.settle({**space.baseline, "update": "eager"})
        self._baseline, self._eager = identity(space.baseline), identity(eager)
        self.controls = Controls(self._baseline, devices)
        self._compared = Comparison(self._results, self.controls, self._baseline, objective)
        for record in records:
            self._resume(record)
        for execution in (space.baseline, eager):
            self._candidates.register(execution)

    def ask(self, remaining_seconds: float, device: str | None = None) -> Trial | Wait | Finished:
        """What to do with `remaining_seconds` left; a Trial counts as running from here on.

        `device` (by `noise.device_name`) is the one whose trial has just ended, where that is known.
        """
        unanswered = self.incumbent() is None
        self._admission = Admission(remaining_seconds, self._reserve, self.space.baseline, unanswered)
        if self._baseline in self._searching():
            comes_first = f"{self._candidates[self._baseline].id} comes first: every other is compared with it"
            return self._ask_control(device) or Wait(comes_first)
        answer = self._ask_first(device) or self._ask_search(device)
        if isinstance(answer, Finished) and self._running:
            return Wait(f"what is next depends on {', '.join(self._running)}")
        return self._ask_verification(answer) if isinstance(answer, Finished) else answer

    def tell(self, record: TrialRecord) -> None:
        """Take the record of a running trial."""
        trial = self._running.pop(record.candidate, None)
        assert trial is not None, f"{record.candidate} ({record.execution_identity}) was told but is not running"
        if trial.stage == "verification":
            assert self.verification is not None
            self.measured_again.append(record)
            self.verification.tell(record)
        else:
            self._learn(record)
            if trial.stage != "control":
                keep(record, settles(record, self._cost.records), self._results, self._lapsed)

    def bar(self, trial: Trial) -> Bar:
        """What the trial is stopped for where it cannot reach it; nothing for what others are compared with."""
        protocol = trial.protocol or self.protocol
        if trial.stage != "search" or protocol.version != "adaptive":
            return Bar()
        known = [*self._cost.records, *self.measured_again]
        return self._compared.bar(trial.candidate.execution, self._cost.starts, known, protocol.window_seconds)

    def incumbent(self) -> TrialRecord | None:
        """The fastest complete record so far, devices considered and noise not."""
        return self._compared.incumbent()

    def selection(self) -> Selection | None:
        """The verdict so far: verification's where it has one, else the search's; None while nothing is complete."""
        verified, found = self.verified(), self._choice()
        if verified is not None:
            found = Selection(verified.selected, verified.ties, verified.reason)
        return self._compared.as_measured(found) if found else None

    def verified(self) -> Verified | None:
        """What pairs of fresh processes say, which the search's own figures cannot; None while they say nothing."""
        return self.verification.outcome() if self.verification is not None else None

    def _choice(self) -> Selection | None:
        """The search's."""
        if self._selected is None:
            outlook = Outlook(self.space, self.objective, self._cost, self._priors)
            self._selected = (self._compared.choose(self._cost.starts, outlook.expected_rate),)
        return self._selected[0]

    def versus_baseline(self, record: TrialRecord | None) -> float | None:
        """The record's throughput over the baseline's, their devices' speeds taken out; None without either."""
        return self._compared.versus_baseline(record)

    def winners(self) -> list[Winner]:
        """For 10 M to 10 B targets the record whose planned trainings take least."""
        return self._compared.winners(self._cost.starts)

    def account(self) -> Account | None:
        """What was spent and what it saves; None before there is a verdict, and where the objective has no seconds."""
        spent, selection = [*self._cost.records, *self.measured_again], self.selection()
        return self._compared.account(spent, selection.record, self._cost.starts) if selection else None

    def candidates(self) -> list[CandidateStatus]:
        """Every candidate the study knows by now, in the order of their numbers; last, what did not fit the budget."""
        again = [*self.controls.records, *self.measured_again]
        return self._standing().of_all(self._candidates, again, self._running.values())

    def baseline(self) -> CandidateStatus:
        """The candidate every other is compared with."""
        return self._standing().of(self._candidates[self._baseline])

    def eager_row(self) -> CandidateStatus:
        """The eager candidate at the baseline's micro-batch, which every report shows; the baseline itself on a CPU."""
        return self._standing().of(self._candidates[self._eager])

    # What comes next

    def _ask_first(self, device: str | None) -> Trial | Finished | None:
        """The baseline, and the eager row; None when they are settled, or the eager row does not fit."""
        if self._baseline not in self._results:
            # Without the baseline there is no answer at all, so it may take the chance.
            prediction = self._cost.predict(self.space.baseline)
            if prediction.expected_seconds <= self._admission.seconds_left:
                return self._run(Trial(self._candidates[self._baseline], "baseline", prediction))
            self._admission.left_out[self._baseline] = self.space.baseline, prediction
            return Finished(f"budget: the baseline needs {self._admission.least()}", budget_exhausted=True)
        if self._eager not in self._results and self._eager not in self._searching():
            execution = self._candidates[self._eager].execution
            if out_of_memory(execution, self._results.values()) is None:
                prediction = self._prediction(execution)
                if self._admission.fits(execution, prediction):
                    return self._start(execution, "eager", prediction, device)
                self._admission.left_out[self._eager] = execution, prediction
        return None

    def _ask_search(self, device: str | None) -> Trial | Finished:
        """What promises most for its seconds among all that fits and pays."""
        if hopeless(self._results.values()):
            return Finished(f"none of {len(self._results)} candidates ran", budget_exhausted=False)
        running = [trial.candidate.execution for trial in self._running.values()]
        outlook = Outlook(self.space, self.objective, self._cost, self._priors, running, self._lapsed)
        if not (open_ := self._open(outlook)):
            return self._finished("space exhausted")
        found = outlook.prospects(open_, self.verifier)
        paying = [prospect for prospect in found if prospect.pays(self.objective)]
        hopes = (True, False) if self._nothing_to_verify() else (True,)
        for verified, prospect in itertools.product(hopes, paying):
            if self._admission.fits(prospect.execution, prospect.prediction, verified):
                return self._start(prospect.execution, "search", prospect.prediction, device)
        for prospect in paying[:_FEW]:
            self._admission.left_out[prospect.identity] = prospect.execution, prospect.prediction
        return self._finished(f"nothing left is expected to {self.objective.gain_in_words}")

    def _ask_verification(self, end: Finished) -> Trial | Finished:
        """Finalists and baseline again, one at a time, after the search's `end`."""
        self.verification = self.verification or self._begin_verification()
        if self.verification is None:
            return end
        asked = self.verification.ask(self._admission.seconds_left)
        if isinstance(asked, Finished):
            return replace(end, reason=f"{end.reason}; {asked.reason}")
        prediction = self._cost.predict(asked.record.execution, warm=True, protocol=asked.protocol)
        candidate = again(self._candidates[asked.record.execution_identity], asked.name)
        return self._run(Trial(candidate, "verification", prediction, asked.protocol, asked.device, asked.round))

    def _begin_verification(self) -> Verification | None:
        selection, baseline = self._choice(), self._results.get(self._baseline)
        if self.verifier is None or selection is None or baseline is None:
            return None
        cost = replace(self._cost, records=tuple(self.controls.levelled(self._cost.records)))
        return self.verifier.begin(selection, baseline, self.measured_again, cost)

    def _nothing_to_verify(self) -> bool:
        """Whether the baseline is best and no tie with it can be told in time: any other choice is better than that."""
        choice = self._choice()
        if choice is None or choice.record.execution != self.space.baseline:
            return False
        verification = self._begin_verification()
        return verification is None or isinstance(verification.ask(self._admission.seconds_left), Finished)

    def _ask_control(self, device: str | None) -> Trial | None:
        """The baseline as a control, where a device has not measured it yet, or `device` not for long."""
        baseline = self._candidates[self._baseline]
        trial = self.controls.ask(device, baseline, self.protocol, self._cost, self._admission, self._running.values())
        return self._run(trial) if trial else None

    def _open(self, outlook: Outlook) -> dict[str, dict[str, Any]]:
        """Executions that may be measured, by identity."""
        anchors = [record.execution for record in ranked(self._compared.levelled())[:_FEW]]
        reach = self._pool.around([*anchors, self.space.baseline], outlook.gains_a_second, outlook.host_bound)
        is_ruled_out = RuledOut(self._results.values(), self.space.factors.get("sdpa_backend", ()))
        known = {*self._results, *self._searching()}
        return {name: one for name, one in reach.items() if name not in known and not is_ruled_out(one)}

    def _prediction(self, execution: Mapping[str, Any]) -> Prediction:
        """Of the search, the baseline first."""
        protocol = self.protocol if execution == self.space.baseline else self.space.search_protocol
        return self._cost.predict(execution, protocol=protocol)

    def _reserve(self, execution: Mapping[str, Any]) -> float:
        """Seconds to keep for verification, should this execution, the present choice, or the fastest win."""
        if not any(one.execution_identity == self._baseline for one in ranked(self._results.values())):
            return 0.0  # nothing is verified that no baseline stands beside
        selection = self._choice()
        finalists = [execution, *(one.execution for one in (selection and selection.record, self.incumbent()) if one)]
        return reserved_seconds(self.verifier, self._cost, finalists, self.space.baseline)

    def _start(self, execution: dict[str, Any], stage: str, prediction: Prediction, device: str | None) -> Trial:
        """The trial, unless its device has to measure the control first."""
        if control := self._ask_control(device):
            return control
        candidate = self._candidates.register(execution)
        return self._run(Trial(candidate, stage, prediction, self.space.search_protocol))

    def _run(self, trial: Trial) -> Trial:
        return self._running.setdefault(trial.candidate.id, trial)

    # What is known

    def _resume(self, record: TrialRecord) -> None:
        if record.purpose in ("verification", "repeat"):
            self.measured_again.append(record)
            return
        self._learn(record)
        if record.purpose == "control":
            return
        self._candidates.keep(record.candidate, record.execution, record.execution_identity)
        keep(record, record.fate not in MEASURED_AGAIN, self._results, self._lapsed)

    def _learn(self, record: TrialRecord) -> None:
        self.controls.hear(record)
        self._cost = replace(self._cost, records=(*self._cost.records, record))
        self._selected = self.verification = None

    def _searching(self) -> dict[str, Trial]:
        """The search's running trials by execution identity; neither controls nor verification's."""
        running = self._running.values()
        return {trial.candidate.execution_identity: trial for trial in running if trial.stage not in AGAIN}

    def _standing(self) -> Standing:
        known = self._results, self._lapsed, self._searching()
        return Standing(*known, self._admission, self._baseline, self._prediction)

    def _finished(self, why: str) -> Finished:
        left_out = bool(self._admission.left_out)
        why = f"budget: the next candidate needs {self._admission.least()}" if left_out else why
        spent = self.account()
        return Finished(f"{why}; {spent}" if spent else why, budget_exhausted=left_out)
