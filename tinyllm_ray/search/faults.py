"""How likely an execution is to run, by what explains the failures so far: settings, pairs of settings, or bad luck.

Every setting, every pair of settings that both differ from the baseline's, and every execution as a whole is at fault
with a small probability, each by itself; an execution runs where nothing in it is at fault. What ran is free of faults,
what failed has one. An explanation is a set of faults that accounts for every failure (a hitting set; de Kleer &
Williams, Diagnosing Multiple Faults, 1987): one setting that was in all of them is a better one than two pairs. The
best explanations are kept, so that a fault once found explains further failures, and clears the settings beside it.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.kinds import dimensions
from tinyllm_ray.search.ruled_out import RAN

BROKEN = frozenset({Fate.FAILED, Fate.INVALID, Fate.TIMED_OUT})
"""Fates that speak against the settings of their trial."""

SETTING_AT_FAULT, PAIR_AT_FAULT, EXECUTION_AT_FAULT = 0.01, 0.003, 0.001
"""Probabilities before any record."""

MOST_EXPLANATIONS = 64

Level = tuple[str, Any]
Item = tuple[Level, ...]
"""What may be at fault: one setting, a pair, or all settings of an execution."""


class Chances:
    """How likely executions are to run and to compute what they should, from those that did and those that did not."""

    def __init__(self, baseline: Mapping[str, Any], records: Sequence[TrialRecord]) -> None:
        self._plain = frozenset(_levels(baseline))
        self._sound: set[Item] = set()
        for record in records:
            if record.fate in RAN:
                self._sound.update(self._items(_levels(record.execution)))
        failed = dict.fromkeys(_levels(record.execution) for record in records if record.fate in BROKEN)
        self._explanations = self._explain(list(failed))

    def __call__(self, execution: Mapping[str, Any]) -> float:
        """Probability that the execution runs."""
        levels = _levels(execution)
        chance = 1.0
        for item in self._items(levels):
            if item not in self._sound:
                chance *= 1 - _prior(item)
        if not self._explanations:
            return chance
        has = frozenset(levels)
        spared = (
            weight for faults, weight in self._explanations.items() if not any(has.issuperset(item) for item in faults)
        )
        return chance * min(1.0, sum(spared))

    def _explain(self, failed: Sequence[tuple[Level, ...]]) -> dict[frozenset[Item], float]:
        """Probabilities of the best explanations of these executions' failures; empty where none failed."""
        found: dict[frozenset[Item], float] = {frozenset(): 1.0}
        for levels in failed:
            has, suspects = frozenset(levels), [item for item in self._items(levels) if item not in self._sound]
            longer: dict[frozenset[Item], float] = {}
            for faults, weight in found.items():
                if any(has.issuperset(item) for item in faults):
                    longer[faults] = weight
                    continue
                for item in (*suspects, levels):
                    prior = _prior(item)
                    longer.setdefault(faults | {item}, weight * prior / (1 - prior))
            best = sorted(longer.items(), key=lambda one: -one[1])[:MOST_EXPLANATIONS]
            total = sum(weight for _, weight in best)
            found = {faults: weight / total for faults, weight in best}
        return found if failed else {}

    def _items(self, levels: tuple[Level, ...]) -> Iterator[Item]:
        """All that may be at fault but for the whole."""
        for level in levels:
            yield (level,)
        yield from itertools.combinations([level for level in levels if level not in self._plain], 2)


def _prior(item: Item) -> float:
    return {1: SETTING_AT_FAULT, 2: PAIR_AT_FAULT}.get(len(item), EXECUTION_AT_FAULT)


def _levels(execution: Mapping[str, Any]) -> tuple[Level, ...]:
    """Every setting with its value, in a fixed order; how a kind launches is the kind's."""
    return tuple(item for item in dimensions(execution).items() if item[0] != "launches")
