"""What the fates of others say of an execution: whether it can fit in memory, and how likely it is to run at all."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tinyllm_ray.execution import HOST_KEYS
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.kinds import dimensions

SAVES_MEMORY = {
    "recompute_activations": (False, True),
    "loss_kernel": ("torch", "triton"),
    "residual_dtype": ("float32", "bfloat16"),
}
"""Settings whose second value never needs more memory than the first."""

BROKEN = frozenset({Fate.FAILED, Fate.INVALID, Fate.TIMED_OUT})
"""Fates that speak against the settings of their trial."""

RAN = frozenset({Fate.COMPLETE, Fate.DOMINATED})

BLAMED_ON_SETTINGS, BLAMED_ON_PAIRS = 0.45, 0.45
"""Shares of a failure put on settings that have never worked and on pairs of settings that have never worked together,
each in equal parts; where there is none of the one, the other takes both. The rest is that execution's own."""

UNTRIED = 0.99
"""Probability that a setting nothing is known of works."""

HOPELESS_TRIALS = 8
"""After so many without one that ran, the study gives up: the fault is not in the settings."""


def out_of_memory(execution: Mapping[str, Any], records: Iterable[TrialRecord]) -> TrialRecord | None:
    """A record that ran out of memory with no larger micro-batch and nothing that needs more; None where there is none.

    Everything else has to be equal: kinds of update and backends need different amounts.
    """
    for record in records:
        if record.fate == Fate.OUT_OF_MEMORY and _needs_as_much(execution, record.execution):
            return record
    return None


def hopeless(records: Collection[TrialRecord]) -> bool:
    """Whether so many failed, and none ran, that trying others makes no sense."""
    return len(records) >= HOPELESS_TRIALS and not any(record.fate in RAN for record in records)


def _needs_as_much(execution: Mapping[str, Any], failed: Mapping[str, Any]) -> bool:
    for key, value in execution.items():
        other = failed.get(key, value)
        if key in HOST_KEYS or value == other:
            continue
        if key == "micro_batch_size" and value > other:
            continue
        if key in SAVES_MEMORY and SAVES_MEMORY[key] == (value, other):
            continue
        return False
    return True


class Chances:
    """How likely executions are to run, from those that did and those that did not.

    A failure is blamed on what has never worked: levels, and pairs of levels that both differ from the baseline.
    """

    def __init__(self, baseline: Mapping[str, Any], records: Sequence[TrialRecord]) -> None:
        self._plain = set(_levels(baseline))
        ran = [_levels(record.execution) for record in records if record.fate in RAN]
        self._worked = set(itertools.chain.from_iterable(ran))
        self._worked_together = {pair for levels in ran for pair in self._pairs(levels)}
        self._blamed: dict[Any, float] = {}
        for record in records:
            if record.fate in BROKEN:
                self._blame(_levels(record.execution))

    def __call__(self, execution: Mapping[str, Any]) -> float:
        """Probability that the execution runs and computes what it should."""
        levels = _levels(execution)
        chance = 1.0
        for level in levels:
            if level not in self._worked:
                chance *= UNTRIED * self._blamed.get(level, 1.0)
        if self._blamed:
            for pair in self._pairs(levels):
                chance *= self._blamed.get(pair, 1.0)
        return chance

    def _blame(self, levels: tuple[Any, ...]) -> None:
        alone = [level for level in levels if level not in self._worked]
        pairs = [pair for pair in self._pairs(levels) if pair not in self._worked_together]
        shares = (BLAMED_ON_SETTINGS, BLAMED_ON_PAIRS)
        for suspects, share, other in ((alone, shares[0], pairs), (pairs, shares[1], alone)):
            for suspect in suspects:
                blame = (share if other else sum(shares)) / len(suspects)
                self._blamed[suspect] = self._blamed.get(suspect, 1.0) * (1 - blame)

    def _pairs(self, levels: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
        return itertools.combinations([level for level in levels if level not in self._plain], 2)


def _levels(execution: Mapping[str, Any]) -> tuple[Any, ...]:
    """Every setting with its value, in a fixed order; how a kind launches is the kind's."""
    return tuple(item for item in dimensions(execution).items() if item[0] != "launches")
