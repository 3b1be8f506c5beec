"""The study's last phase: finalists and baseline again, in pairs of fresh processes on one device.

Every round runs the baseline and the finalists once each, forwards or backwards by the Thue-Morse sequence (A B, B A,
B A, A B, ...), so that a drift, linear or curved, cancels over the rounds. After three rounds the winner and the
baseline run under a minute's load, and while a comparison is open more rounds follow, as far as time goes. What the
study reports comes from here alone: the search's own figures chose the winner, and favour it. Fewer than three pairs
say nothing, so three short rounds go before a long one, and where there is no time for these none is begun.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tinyllm_ray.figures import told_apart
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.finalists import SUSTAINED_SECONDS, Predict, first_complete
from tinyllm_ray.search.noise import Spread, device_name
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD, LEAST_PAIRS, MOST_PAIRS, Pair, expected_gain
from tinyllm_ray.search.rates import rate
from tinyllm_ray.search.rounds import Round, home_of, loaded, long_enough, noise_of, short_rounds, side_of, whole_rounds
from tinyllm_ray.search.verified import Evidence, Verified, conclude

_SHORTENINGS = 8
"""Of windows until they fit: what a prediction adds in proportion to them takes a few steps."""

MOST_FAILURES = 2
"""A process that fails is tried once more: what ran in the search may be lost to a node, but not twice."""

WORTH_SHARE = 0.05
"""Of all planned trainings: what longer windows, or a minute under load, may cost. Small recipes are soon trained."""


@dataclass(frozen=True)
class Run:
    """The process to start next; nothing else runs on its device meanwhile."""

    candidate: TrialRecord
    """The search's record of its execution."""
    name: str
    """For its record and its log, unique within the study."""
    round: int
    protocol: Protocol
    device: str | None
    """Where it has to run, by `noise.device_name`; None for any, at first."""


@dataclass(frozen=True)
class Done:
    """Nothing more will start."""

    reason: str
    budget_exhausted: bool = False


class Verification:
    """Asks for processes one at a time, and draws the verdict from their records."""

    def __init__(
        self,
        records: Iterable[TrialRecord],
        baseline: str,
        finalists: Sequence[str],
        predict: Predict,
        protocol: Protocol | None = None,
        spread: Spread = CAUTIOUS_SPREAD,
        at_stake_seconds: float = math.inf,
        expect: Predict | None = None,
        lags: Mapping[str, float] | None = None,
    ) -> None:
        """`records` are the study's; `baseline` and `finalists` (the preferred first) name executions among them.

        `protocol` is the reference's unless given, and `spread` what is known of the device (`noise.spread_of` with
        the cautious one as its prior). Rounds that earlier records of a verification make up whole count on.
        `at_stake_seconds` is what all planned trainings take: what a wrong choice costs is a share of it. `predict`
        says what a process hardly ever exceeds, `expect` what it is expected to take. `lags` (by execution identity)
        are the seconds a target that starts add to the planned trainings; none where throughput decides.
        """
        records = list(records)
        self.records = [record for record in records if record.purpose != "verification"]
        known = first_complete(self.records)
        self.baseline = baseline
        self.finalists = [name for name in finalists if name != baseline and name in known]
        self._known = {name: known[name] for name in [baseline, *self.finalists] if name in known}
        self._predict, self._expect = predict, expect or predict
        self._protocol = protocol or Protocol()
        self.spread = spread
        self._at_stake_seconds = at_stake_seconds
        self._worth_seconds = WORTH_SHARE * at_stake_seconds
        self._lags = lags or {}
        self._spent_seconds = 0.0
        self.withdrawn: dict[str, str] = {}
        """Finalists that are out, by execution identity, and why."""
        self._failures: dict[str, int] = {}
        self._device = home_of(self.records, [*self.finalists, baseline])
        """Where all of it runs, or else where a round's first process did; None at first, where there is one device."""
        self._several = self._device is not None
        self._running: Run | None = None
        self._noise = {name: noise_of(record) for name, record in self._known.items()}
        """By execution identity, of each of its processes: the windows' error, and their seconds in all."""
        self._rounds = whole_rounds(records, self._known)
        self._next_number = 1 + max((record.round for record in records if record.round is not None), default=-1)

    def ask(self, remaining_seconds: float) -> Run | Done:
        """What to do with `remaining_seconds` left; a Run counts as running until its record is told."""
        assert self._running is None, "one process at a time"
        if not self.finalists:
            return Done("the baseline is the best that was found: there is nothing to verify")
        if self.baseline not in self._known:
            return Done("the baseline has no figure: there is nothing to compare with")
        if self.baseline in self.withdrawn:
            return Done(f"the baseline cannot be verified: {self.withdrawn[self.baseline]}")
        if not self._open_round():
            answer = self._plan(remaining_seconds)
            if isinstance(answer, Done):
                return answer
            self._rounds.append(answer)
        current = self._rounds[-1]
        name = next(name for name in current.order if self._is_missing(name, current))
        if self._seconds(name, current.protocol) > remaining_seconds:
            return Done(f"budget: the next process needs up to {self._seconds(name, current.protocol):.0f} s", True)
        again = "-again" if self._failures.get(name) else ""
        label = f"{self._known[name].candidate}-v{current.number + 1}{again}"
        self._running = Run(self._known[name], label, current.number, current.protocol, self._device)
        return self._running

    def tell(self, record: TrialRecord) -> None:
        """Take the record of the running process."""
        run = self._running
        assert run is not None, f"{record.candidate} was told but is not running"
        self._running = None
        self._spent_seconds += record.seconds.total or 0.0
        name, device = run.candidate.execution_identity, device_name(record)
        problem = None
        if record.fate == Fate.LOST and self._several:
            # The device may be gone: the round begins anew, on whichever there is.
            self._device = None
            self._rounds.pop()
        if record.fate != Fate.COMPLETE or rate(record) is None:
            problem = record.reason or record.fate.value
        elif self._device not in (None, device) and self._rounds[-1].sides:
            problem = f"it ran on {device} and the others on {self._device}"
        if problem is None:
            self._device = device
            self._rounds[-1].sides[name] = side_of(record)
            self._noise[name] += noise_of(record)
            return
        self._failures[name] = self._failures.get(name, 0) + 1
        if self._failures[name] >= MOST_FAILURES:
            self.withdrawn[name] = f"failed in the verification: {problem}"

    def pairs(self, candidate: str, other: str) -> list[Pair]:
        """All pairs of two executions, by identity, oldest first."""
        both = [one for one in self._rounds if candidate in one.sides and other in one.sides]
        return [Pair(one.sides[candidate], one.sides[other], one.sustained) for one in both]

    def planned_pairs(self, candidate: str, other: str) -> list[Pair]:
        """The same as over all planned trainings, starts included."""
        lags = self._lags.get(candidate, 0.0), self._lags.get(other, 0.0)
        return [pair.planned(*lags) for pair in self.pairs(candidate, other)]

    def members(self) -> list[str]:
        """The baseline and the finalists that are not out, by execution identity."""
        return [name for name in self._known if name not in self.withdrawn]

    def sustained_rate(self, name: str) -> float | None:
        """Targets a second under a minute's load; None where it was not measured."""
        sides = [one.sides[name] for one in self._rounds if one.sustained and name in one.sides]
        return sides[-1].targets_per_second if sides else None

    def outcome(self) -> Verified | None:
        """The verdict so far; None before the baseline and a finalist make three pairs."""
        return conclude(
            Evidence(
                baseline=self.baseline,
                members={name: self._known[name] for name in self.members()},
                pairs=self.pairs,
                sustained_rate=self.sustained_rate,
                records=self.records,
                comparisons=len(self.finalists),
                spread=self.spread,
                planned=self.planned_pairs,
            )
        )

    def _plan(self, remaining: float) -> Round | Done:
        """The next round."""
        if (early := self._early_round(remaining)) is not None:
            return early
        found = self.outcome()
        if found is None:
            return Done("no finalist is left")
        selected, open_ones = found.selected.execution_identity, found.open_comparisons
        if selected != self.baseline and self.sustained_rate(selected) is None:
            members, protocol = [self.baseline, selected], loaded(self._protocol, SUSTAINED_SECONDS)
            load = self._round_seconds(members, protocol)
            if load <= min(remaining, self._worth_seconds):
                return self._round(members, protocol)
            if not open_ones and load > remaining:
                return Done("budget: no time for the winner and the baseline under a minute's load", True)
            if not open_ones:
                return Done("a minute's load costs more than it may of the planned trainings")
        if not open_ones:
            return Done("every comparison is decided")
        if len(self._rounds) >= MOST_PAIRS:
            return Done(f"{len(self._rounds)} rounds are enough: what is open is a tie")
        return self._later_round(open_ones, selected, remaining)

    def _early_round(self, remaining: float) -> Round | Done | None:
        """One of the first three, without the finalists for whom the time left would not do for all three; None once
        the others have them."""
        while (left := max(self._lacking().values(), default=0)) and len(members := self.members()) > 2:
            if self._fitting(members, left, remaining) is not None:
                break
            self.withdrawn[list(self._lacking())[-1]] = "no time to verify it"
        if len(members := self.members()) < 2:
            return Done("no finalist is left")
        if not left:
            return None
        load = self._round_seconds(members[:2], loaded(self._protocol, SUSTAINED_SECONDS))
        for seconds in (remaining - load, remaining):
            protocol = self._fitting(members, left, seconds)
            if protocol is not None:
                return self._round(members, protocol)
        executions = [self._known[name].execution for name in members]
        short, needed = short_rounds(self._protocol, left, executions, self._expect, self._predict)
        if needed <= remaining:
            return self._round(members, short)
        return Done(f"budget: {LEAST_PAIRS} pairs of processes need up to {needed:.0f} s", True)

    def _lacking(self) -> dict[str, int]:
        """Finalists without three short pairs, and how many they lack; an interrupted round may have left out the
        baseline. None where only others than the preferred one became finalists since: what is verified stays so."""
        pairs = {name: self.pairs(name, self.baseline) for name in self.members() if name != self.baseline}
        short = {name: sum(not pair.sustained for pair in found) for name, found in pairs.items()}
        lacking = {name: LEAST_PAIRS - count for name, count in short.items() if count < LEAST_PAIRS}
        begun = any(count < LEAST_PAIRS for count in lacking.values())
        return lacking if begun or next(iter(short), None) in lacking else {}

    def _later_round(self, open_ones: Sequence[str], selected: str, remaining: float) -> Round | Done:
        """One more for comparisons that are open, while what is `selected` so far may cost more than that."""
        names = [name for name in dict.fromkeys([self.baseline, *open_ones]) if name not in self.withdrawn]
        protocol = self._fitting(names, 1, remaining)
        if protocol is None:
            return Done(f"budget: the next round needs up to {self._round_seconds(names, self._protocol):.0f} s", True)
        # A tie goes to what starts soonest: what the others may be faster than that one is left on the table.
        others = [self.planned_pairs(name, selected) for name in open_ones if name != selected]
        gains = [expected_gain(pairs, self.spread) for pairs in others]
        worth = max(gains) * self._at_stake_seconds
        # With the later rounds so far: a difference that takes many rounds to tell has to be worth them all.
        later = 1 + sum(not one.sustained for one in self._rounds) - LEAST_PAIRS
        costs = later * self._round_seconds(names, protocol)
        if worth < costs:
            left, takes = told_apart(".0f", worth, costs)
            return Done(f"what is open is worth {left} s of the planned trainings, telling it {takes} s or more")
        return self._round(names, protocol)

    def _round(self, members: list[str], protocol: Protocol) -> Round:
        backwards = len(self._rounds).bit_count() % 2
        self._next_number += 1
        return Round(self._next_number - 1, members[::-1] if backwards else members, protocol)

    def _open_round(self) -> bool:
        return bool(self._rounds) and any(self._is_missing(name, self._rounds[-1]) for name in self._rounds[-1].order)

    def _is_missing(self, name: str, one: Round) -> bool:
        # Once the baseline is out nothing that is missing can make a pair.
        return name not in one.sides and name not in self.withdrawn

    def _seconds(self, name: str, protocol: Protocol) -> float:
        return self._predict(self._known[name].execution, protocol)

    def _round_seconds(self, members: Iterable[str], protocol: Protocol) -> float:
        return sum(self._seconds(name, protocol) for name in members)

    def _fitting(self, members: list[str], rounds: int, remaining: float) -> Protocol | None:
        """The protocol by which so many rounds fit the time; None where even the shortest does not.

        That is the study's own; where some member's windows leave a larger error than processes do, longer ones, as
        they need, as the time allows and as what is at stake is worth.
        """
        own = self._round_seconds(members, self._protocol) * rounds
        remaining = min(remaining, max(self._worth_seconds - self._spent_seconds, own))
        updates = self._protocol.windows * self._protocol.updates_per_window
        shortest = max(updates * (self._known[name].seconds_per_update or 0.0) for name in members)
        wanted = min(max(long_enough(self._noise[name], self.spread) for name in members), SUSTAINED_SECONDS - 1)
        for _ in range(_SHORTENINGS):
            if wanted <= shortest:
                break
            protocol = loaded(self._protocol, wanted)
            excess = self._round_seconds(members, protocol) * rounds - remaining
            if excess <= 0:
                return protocol
            wanted -= excess / rounds / len(members)
        return self._protocol if own <= remaining else None
