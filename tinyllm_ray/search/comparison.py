"""The search's results beside each other, as on one device: the best, the choice, the winners, what is saved."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinyllm_ray.measure.need import Bar
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.account import Account, account
from tinyllm_ray.search.controls import Controls
from tinyllm_ray.search.noise import NoiseOfWindows, bar_of, spread_of
from tinyllm_ray.search.objective import Objective, StartsOf, Winner, winners
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD
from tinyllm_ray.search.rates import fastest, ranked, rate
from tinyllm_ray.search.verdict import Selection, select


@dataclass(frozen=True)
class Comparison:
    """What it gives out is as it was measured; what it compares is levelled by the controls."""

    results: Mapping[str, TrialRecord]
    """By execution identity."""
    controls: Controls
    baseline: str
    objective: Objective

    def levelled(self) -> list[TrialRecord]:
        """All results as on one device at one time."""
        return self.controls.levelled(self.results.values())

    def incumbent(self) -> TrialRecord | None:
        """The fastest complete record, devices considered and noise not."""
        best = fastest(self.levelled())
        return self.results[best.execution_identity] if best else None

    def bar(
        self, execution: Mapping[str, Any], starts: StartsOf, known: Sequence[TrialRecord], window_seconds: float
    ) -> Bar:
        """What an execution has to be able to reach, wherever it will run; nothing while nothing is complete.

        The lower bound of the fastest; where the objective counts seconds, and what the execution saves at its starts
        would make up for less, so much less. `known` are all of the study's records, oldest first, which tell of noise.
        """
        spread, noise = spread_of(known, CAUTIOUS_SPREAD), NoiseOfWindows(known)

        def reached(record: TrialRecord) -> Bar:
            # What is dominated even on the slowest device is so on all.
            return bar_of(record, spread, self.controls.slowest(record), noise, window_seconds)

        best = self.incumbent()
        if best is None:
            return Bar()
        bar = reached(best)
        if bar.targets_per_second is None or self.objective.kind == "throughput":
            return bar
        soonest = min(
            ranked(self.levelled()), key=lambda one: self.objective.seconds(starts(one.execution), rate(one) or 0.0)
        )
        beaten = reached(self.results[soonest.execution_identity]).targets_per_second
        if beaten is None:
            return bar
        spared = self.objective.seconds(starts(soonest.execution), beaten)
        spared -= self.objective.fixed_seconds(starts(execution))
        enough = self.objective.targets / spared if spared > 0 else math.inf
        return replace(bar, targets_per_second=min(bar.targets_per_second, enough))

    def choose(self, starts: StartsOf, expected: Callable[[TrialRecord], float]) -> Selection | None:
        """The verdict, its records levelled; see `verdict.select`."""
        return select(self.levelled(), self.baseline, self.objective, starts, expected, self.controls.doubt)

    def as_measured(self, selection: Selection) -> Selection:
        """The selection with the records as they were measured."""
        ties = tuple(self.results[record.execution_identity] for record in selection.ties)
        return replace(selection, record=self.results[selection.record.execution_identity], ties=ties)

    def versus_baseline(self, record: TrialRecord | None) -> float | None:
        """The record's throughput over the baseline's, their devices' speeds taken out; None without either."""
        both = [one for one in (record, self.results.get(self.baseline)) if one is not None]
        rates = [rate(one) for one in self.controls.levelled(both)]
        return rates[0] / rates[1] if len(rates) == 2 and rates[0] and rates[1] else None

    def winners(self, starts: StartsOf) -> list[Winner]:
        """For 10 M to 10 B targets the record whose planned trainings take least; its figures are levelled."""
        return winners(self.levelled(), starts, self.objective.runs, baseline=self.baseline)

    def account(self, spent: Iterable[TrialRecord], selected: TrialRecord, starts: StartsOf) -> Account | None:
        """What all trials in `spent` took, and what `selected` saves; None where the objective has no seconds."""
        if self.baseline not in self.results:
            return None
        baseline, selected = self.controls.levelled([self.results[self.baseline], selected])
        return account(spent, baseline, selected, self.objective, starts)
