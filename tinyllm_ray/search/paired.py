"""How a study verifies: the rounds of `verification`, kept time for where they fit into a share of the budget."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.answers import Finished
from tinyllm_ray.search.cost import CostModel
from tinyllm_ray.search.finalists import MOST_FINALISTS, choose_finalists
from tinyllm_ray.search.noise import spread_of
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD, LEAST_PAIRS
from tinyllm_ray.search.rates import rate
from tinyllm_ray.search.rounds import pairs_seconds, shortest
from tinyllm_ray.search.verdict import THROUGHPUT, Selection
from tinyllm_ray.search.verification import Run, Verification
from tinyllm_ray.search.verified import Verified
from tinyllm_ray.search.verifier import Again

RESERVED_SHARE = 0.5
"""Of a budget, at most, for verification: a budget that three pairs would take most of is better spent on searching."""


@dataclass(frozen=True)
class PairedVerifier:
    """A `Verifier`: three interleaved pairs of fresh processes and more while a comparison is open."""

    protocol: Protocol
    most_seconds: float
    """Seconds to keep for it at most; where it needs more it has what the search leaves."""
    objective: Objective = THROUGHPUT
    """Where it counts seconds, no comparison goes on that is worth less of them than it costs."""

    def seconds(self, cost: CostModel, one: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
        """What three pairs are not begun without, short ones where those of the study's protocol take too much of the
        budget; 0 where these do, too."""
        whole, short = (
            [cost.predict(execution, warm=True, protocol=protocol) for execution in (one, baseline)]
            for protocol in (self.protocol, self._shortest)
        )
        expected = [prediction.expected_seconds for prediction in short]
        least = pairs_seconds(LEAST_PAIRS, expected, [prediction.upper_seconds for prediction in short])
        wanted = LEAST_PAIRS * sum(prediction.expected_seconds for prediction in whole)
        return next((seconds for seconds in (max(wanted, least), least) if seconds <= self.most_seconds), 0.0)

    @functools.cached_property
    def _shortest(self) -> Protocol:
        return shortest(self.protocol)

    def begin(
        self, selection: Selection, baseline: TrialRecord, earlier: Sequence[TrialRecord], cost: CostModel
    ) -> "Rounds":
        """Verify the search's choice and what cannot be told from it."""

        def predict(execution: Mapping[str, Any], protocol: Protocol) -> float:
            return cost.predict(execution, warm=True, protocol=protocol).upper_seconds

        def expect(execution: Mapping[str, Any], protocol: Protocol) -> float:
            return cost.predict(execution, warm=True, protocol=protocol).expected_seconds

        records = [*cost.records, *earlier]
        spread = spread_of(records, CAUTIOUS_SPREAD)
        name, measured = baseline.execution_identity, rate(baseline)
        at_stake, lags = math.inf, dict[str, float]()
        if self.objective.kind == "training" and measured is not None:
            at_stake, lags = self.objective.seconds(cost.starts(baseline.execution), measured), self._lags(cost)
        # What ties with the choice by the search's figures differs from it by about the spread of processes.
        costs = LEAST_PAIRS * predict(selection.record.execution, self.protocol)
        fewest = 0 if selection.record.execution_identity == name else 1
        most = MOST_FINALISTS if spread.value * at_stake > costs else fewest
        close = choose_finalists(cost.records, name, spread, lags=lags)
        # The fastest first: of a tie the search chooses what starts soonest, which may be worth nothing to verify.
        finalists = list(dict.fromkeys([*close[:1], selection.record.execution_identity, *close]))
        finalists = [finalist for finalist in finalists if finalist != name][:most]
        return Rounds(Verification(records, name, finalists, predict, self.protocol, spread, at_stake, expect, lags))

    def _lags(self, cost: CostModel) -> dict[str, float]:
        """Seconds a target that starts add to the planned trainings, by execution identity."""
        executions = {record.execution_identity: record.execution for record in cost.records}
        fixed = {name: self.objective.fixed_seconds(cost.starts(one)) for name, one in executions.items()}
        return {name: seconds / self.objective.targets for name, seconds in fixed.items()}


@dataclass(frozen=True)
class Rounds:
    """A verification in the study's words."""

    verification: Verification

    def ask(self, remaining_seconds: float) -> Again | Finished:
        """The process to start next, or that it is over and why."""
        answer = self.verification.ask(remaining_seconds)
        if isinstance(answer, Run):
            return Again(answer.candidate, answer.name, answer.protocol, answer.device, answer.round)
        return Finished(answer.reason, answer.budget_exhausted)

    def tell(self, record: TrialRecord) -> None:
        """Take the record of the process asked for last."""
        self.verification.tell(record)

    def outcome(self) -> Verified | None:
        """The verdict so far; None before a finalist and the baseline have been measured side by side three times."""
        return self.verification.outcome()
